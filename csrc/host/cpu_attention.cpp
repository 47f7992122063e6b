// Attention of one row over its list of keys, and the indexer's scores: dot products of a few heads with many gathered rows.
#include <algorithm>

#include "cpu_ops.h"

namespace dix {
namespace {

constexpr int kKeys = 8;  // keys whose running sums are in registers together
#if defined(__AVX512F__)
constexpr int kVectors = 2;  // vectors of output channels per pass over the keys
#else
constexpr int kVectors = 1;
#endif

// out[key] = q . key for as many heads as V has lanes, while keys of the `next` call are fetched. q: [dim, lanes]; dim is a multiple of 16.
// One sum in ascending order: some fake-quantised window keys of the reference vectors lie on a rounding edge, and the reference's own side
// of it is the one that this order reaches. Check them after a change.
template <class V>
void score(const float* q, const float* const* keys, const float* const* next, int dim, V* out) {
    constexpr int kWidth = sizeof(V) / sizeof(float), kLine = 16;
    V total[kKeys] = {};
    for (int line = 0; line < dim; line += kLine) {
        for (int j = 0; j < kKeys; ++j) __builtin_prefetch(next[j] + line);
        for (int d = line; d < line + kLine; ++d) {
            const V query = load<V>(q + d * kWidth);
            for (int j = 0; j < kKeys; ++j) total[j] = fma(query, splat<V>(keys[j][d]), total[j]);
        }
    }
    for (int j = 0; j < kKeys; ++j) out[j] = total[j];
}

// The keys behind a group, or the group itself at the end of a list.
const float* const* following(const float* const* keys, int k, int count) { return keys + (k + kKeys < count ? k + kKeys : k); }

// Weighted sum of keys for kLanes heads, channels [first, first + 16 * kVectors). weights: kLanes per key, at a distance of `stride`.
void weigh(const float* weights, int stride, const float* const* keys, int count, int first, F16 out[kLanes][kVectors]) {
    F16 total[kLanes][kVectors] = {};
    for (int k = 0; k < count; ++k) {
        F16 value[kVectors];
        for (int v = 0; v < kVectors; ++v) value[v] = load<F16>(keys[k] + first + 16 * v);
        for (int h = 0; h < kLanes; ++h) {
            const F16 weight = splat<F16>(weights[k * stride + h]);
            for (int v = 0; v < kVectors; ++v) total[h][v] = fma(weight, value[v], total[h][v]);
        }
    }
    std::memcpy(out, total, sizeof total);
}

// Outputs of the heads from `head` on, after their weights.
void sum_values(const AttentionShape& shape, int head, const float* weights, int stride, const KeyList& list, const float* denominators, float* out) {
    for (int d = 0; d < shape.head_dim; d += 16 * kVectors) {
        F16 sums[kLanes][kVectors];
        weigh(weights, stride, list.keys, list.count, d, sums);
        for (int lane = 0; lane < std::min(kLanes, shape.heads - head); ++lane) {
            float* to = out + int64_t(head + lane) * shape.head_dim + d;
            for (int v = 0; v < kVectors; ++v) store(to + 16 * v, sums[lane][v] / denominators[lane]);
        }
    }
}

// Unnormalised softmax weights in place. weights: [count, kLanes] scores. Returns the denominators with the sink.
F8 soften(float* weights, int count, F8 sink, float scale) {
    F8 top = sink;
    for (int k = 0; k < count; ++k) top = maximum(top, load<F8>(weights + k * kLanes) * scale);
    F8 total = low(exponential(join(sink - top, F8{})));
    const F16 both = join(top, top);
    for (int k = 0; k < count; k += 2) {
        // The row behind an odd count is padding of the last group of keys.
        const F16 e = exponential(load<F16>(weights + k * kLanes) * scale - both);
        store(weights + k * kLanes, e);
        total = total + low(e);
        if (k + 1 < count) total = total + high(e);
    }
    return total;
}

// The same for two rows side by side. weights: [count, 2 * kLanes]; seen: bit i when row i has the key. A row's maximum and its sums are those
// of its own keys, and their weights move together, in their order: what the row lacks is not even multiplied by zero.
F16 soften(float* weights, const uint8_t* seen, int count, F16 sink, float scale) {
    const F16 nothing = splat<F16>(-INFINITY);
    F16 top = sink;
    for (int k = 0; k < count; ++k) {
        float* own = weights + k * 2 * kLanes;
        F16 x = load<F16>(own);
        if (seen[k] != 3) {
            x = seen[k] == 1 ? join(low(x), low(nothing)) : join(low(nothing), high(x));
            store(own, x);
        }
        top = maximum(top, x * scale);
    }
    F16 total = exponential(sink - top);
    int first = 0, second = 0;  // keys that each row has had
    for (int k = 0; k < count; ++k) {
        const F16 x = load<F16>(weights + k * 2 * kLanes), e = exponential(x * scale - top), weight = x == nothing ? F16{} : e;
        total = total + weight;
        store(weights + first * 2 * kLanes, low(weight));
        store(weights + second * 2 * kLanes + kLanes, high(weight));
        first += seen[k] & 1;
        second += seen[k] >> 1;
    }
    return total;
}

// Two rows of `count` times kLanes values, side by side.
void beside(const float* a, const float* b, int count, float* out) {
    for (int i = 0; i < count; ++i) store(out + i * 2 * kLanes, join(load<F8>(a + i * kLanes), load<F8>(b + i * kLanes)));
}

// Union of two lists, in the order of the names. seen: bit i when list i has the key.
int merge(const KeyList lists[2], const float** keys, uint8_t* seen) {
    const KeyList &a = lists[0], &b = lists[1];
    int i = 0, j = 0, count = 0;
    while (i < a.count || j < b.count) {
        const bool first = j == b.count || (i < a.count && a.names[i] <= b.names[j]);
        const bool second = i == a.count || (j < b.count && b.names[j] <= a.names[i]);
        keys[count] = first ? a.keys[i] : b.keys[j];
        seen[count++] = uint8_t(first | second << 1);
        i += first;
        j += second;
    }
    return count;
}

}  // namespace

void pad_keys(const float** keys, int count) {
    for (int k = count; k % kKeys; ++k) keys[k] = keys[count - 1];
}

void attend(const AttentionShape& shape, const float* q, const KeyList& list, AttentionScratch& scratch, float* out) {
    if (list.count == 0) {
        std::memset(out, 0, size_t(shape.heads) * shape.head_dim * sizeof(float));
        return;
    }
    pad_keys(list.keys, list.count);
    float* weights = scratch.weights.get(size_t(list.count + kKeys) * kLanes);
    const float scale = 1.0f / std::sqrt(float(shape.head_dim));
    for (int head = 0; head < shape.heads; head += kLanes) {
        const float* query = q + int64_t(head) * shape.head_dim;
        for (int k = 0; k < list.count; k += kKeys) {
            F8 scores[kKeys];
            score(query, list.keys + k, following(list.keys, k, list.count), shape.head_dim, scores);
            std::memcpy(weights + k * kLanes, scores, sizeof scores);
        }
        const F8 total = soften(weights, list.count, load<F8>(shape.sink + head), scale);
        float denominators[kLanes];
        store(denominators, total);
        sum_values(shape, head, weights, kLanes, list, denominators, out);
    }
}

void attend(const AttentionShape& shape, const float* const q[2], const KeyList lists[2], AttentionScratch& scratch, float* const out[2]) {
    constexpr int kBoth = 2 * kLanes;
    const int most = lists[0].count + lists[1].count;
    KeyList all = {scratch.keys[2].get(most + kKeys), nullptr};
    uint8_t* seen = scratch.seen.get(most);
    all.count = merge(lists, all.keys, seen);
    pad_keys(all.keys, all.count);
    float* weights = scratch.weights.get(size_t(all.count + kKeys) * kBoth);
    float* query = scratch.queries.get(size_t(shape.head_dim) * kBoth);
    const float scale = 1.0f / std::sqrt(float(shape.head_dim));
    for (int head = 0; head < shape.heads; head += kLanes) {
        const int64_t from = int64_t(head) * shape.head_dim;
        beside(q[0] + from, q[1] + from, shape.head_dim, query);
        for (int k = 0; k < all.count; k += kKeys) {
            F16 scores[kKeys];
            score(query, all.keys + k, following(all.keys, k, all.count), shape.head_dim, scores);
            std::memcpy(weights + k * kBoth, scores, sizeof scores);
        }
        const F8 sink = load<F8>(shape.sink + head);
        const F16 total = soften(weights, seen, all.count, join(sink, sink), scale);
        float denominators[kBoth];
        store(denominators, total);
        for (int r = 0; r < 2; ++r) sum_values(shape, head, weights + r * kLanes, kBoth, lists[r], denominators + r * kLanes, out[r]);
    }
}

namespace {

// Relevance of kKeys keys to the rows side by side in V, while the `next` ones are fetched. q: [groups of heads, D, lanes of V];
// weights: [groups, lanes of V].
template <class V>
void relevance(const float* q, const float* weights, const float* const* keys, const float* const* next, int heads, int dim, V* total) {
    constexpr int kWidth = sizeof(V) / sizeof(float);
    for (int j = 0; j < kKeys; ++j) total[j] = V{};
    for (int group = 0; group * kLanes < heads; ++group) {
        const V weight = load<V>(weights + group * kWidth);
        V products[kKeys];
        score(q + int64_t(group) * dim * kWidth, keys, next, dim, products);
        for (int j = 0; j < kKeys; ++j) total[j] = fma(weight, maximum(V{}, products[j]), total[j]);
    }
}

// Weights of a row's heads, spread like its queries: row `place` of `rows` side by side.
void spread_weights(const float* weights, int heads, int place, int rows, float* to) {
    for (int head = 0; head < heads; ++head) to[(head / kLanes * rows + place) * kLanes + head % kLanes] = weights[head];
}

}  // namespace

void index_scores(const IndexRow& row, const float* const* keys, int heads, int dim, AttentionScratch& scratch) {
    const int groups = (heads + kLanes - 1) / kLanes;
    float* weights = scratch.weights.get(groups * kLanes);
    std::fill_n(weights, groups * kLanes, 0.0f);
    spread_weights(row.weights, heads, 0, 1, weights);
    for (int k = 0; k < row.count; k += kKeys) {
        F8 total[kKeys];
        relevance(row.q, weights, keys + k, following(keys, k, row.count), heads, dim, total);
        for (int j = 0; j < std::min(kKeys, row.count - k); ++j) row.scores[k + j] = sum(total[j]);
    }
}

void index_scores(const IndexRow rows[2], const float* const* keys, int heads, int dim, AttentionScratch& scratch) {
    const int groups = (heads + kLanes - 1) / kLanes, most = std::max(rows[0].count, rows[1].count);
    float* weights = scratch.weights.get(groups * 2 * kLanes);
    float* q = scratch.queries.get(size_t(groups) * dim * 2 * kLanes);
    std::fill_n(weights, groups * 2 * kLanes, 0.0f);
    for (int r = 0; r < 2; ++r) spread_weights(rows[r].weights, heads, r, 2, weights);
    beside(rows[0].q, rows[1].q, groups * dim, q);
    for (int k = 0; k < most; k += kKeys) {
        F16 total[kKeys];
        relevance(q, weights, keys + k, following(keys, k, most), heads, dim, total);
        for (int j = 0; j < kKeys; ++j) {
            if (k + j < rows[0].count) rows[0].scores[k + j] = sum(low(total[j]));
            if (k + j < rows[1].count) rows[1].scores[k + j] = sum(high(total[j]));
        }
    }
}

namespace {

constexpr uint32_t kExcluded = ~0u;

// Bits that rise as scores fall; -inf is excluded.
U16 rank_bits(F16 scores) {
    const U16 bits = (U16)(scores + 0.0f);  // -0 and 0 are equal
    const U16 ranks = (I16)bits < 0 ? bits : ~bits & 0x7FFFFFFFu;
    return scores == -INFINITY ? U16{} + kExcluded : ranks;
}

// How many of ranks[0..count) are at most `limit`. count: a multiple of 16.
int count_up_to(const uint32_t* ranks, int count, uint32_t limit) {
    I16 total = {};
    for (int i = 0; i < count; i += 16) total -= load<U16>(ranks + i) <= limit;
    int sum = 0;
    for (int lane = 0; lane < 16; ++lane) sum += total[lane];
    return sum;
}

}  // namespace

int select_top(const float* scores, int count, int limit, uint32_t* ranks, int32_t* picked) {
    const int whole = count / 16 * 16, size = (count + 15) / 16 * 16;
    for (int i = 0; i < whole; i += 16) {
        const U16 own = rank_bits(load<F16>(scores + i));
        std::memcpy(ranks + i, &own, sizeof own);
    }
    if (whole < count) {
        F16 rest = splat<F16>(-INFINITY);
        std::memcpy(&rest, scores + whole, (count - whole) * sizeof(float));
        const U16 own = rank_bits(rest);
        std::memcpy(ranks + whole, &own, sizeof own);
    }
    // The rank of the last one that is taken, by halves. Of those at this rank as many are taken, from the first on, as have a place.
    uint32_t low = 0, last = kExcluded - 1;
    if (count_up_to(ranks, size, last) > limit) {
        while (low < last) {
            const uint32_t middle = low + (last - low) / 2;
            const int taken = count_up_to(ranks, size, middle);
            if (taken >= limit) {
                last = middle;
            } else {
                low = middle + 1;
            }
            if (taken == limit) break;
        }
    }
    int places = limit - (last > 0 ? count_up_to(ranks, size, last - 1) : 0), found = 0;
    for (int i = 0; i < count; ++i) {
        if (ranks[i] > last || (ranks[i] == last && places-- <= 0)) continue;
        picked[found++] = i;
    }
    return found;
}

}  // namespace dix
