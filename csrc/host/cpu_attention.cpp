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

// out[key] = q . key for kLanes heads. q: [dim, kLanes]. One sum in ascending order: some fake-quantised window keys of the reference
// vectors lie on a rounding edge, and the reference's own side of it is the one that this order reaches. Check them after a change.
void score(const float* q, const float* const* keys, int dim, F8* out) {
    F8 total[kKeys] = {};
    for (int d = 0; d < dim; ++d) {
        const F8 query = load<F8>(q + d * kLanes);
        for (int j = 0; j < kKeys; ++j) total[j] = fma(query, splat<F8>(keys[j][d]), total[j]);
    }
    for (int j = 0; j < kKeys; ++j) out[j] = total[j];
}

// Weighted sum of keys for kLanes heads, channels [first, first + 16 * kVectors). weights: [count, kLanes].
void weigh(const float* weights, const float* const* keys, int count, int first, F16 out[kLanes][kVectors]) {
    F16 total[kLanes][kVectors] = {};
    for (int k = 0; k < count; ++k) {
        F16 value[kVectors];
        for (int v = 0; v < kVectors; ++v) value[v] = load<F16>(keys[k] + first + 16 * v);
        for (int h = 0; h < kLanes; ++h) {
            const F16 weight = splat<F16>(weights[k * kLanes + h]);
            for (int v = 0; v < kVectors; ++v) total[h][v] = fma(weight, value[v], total[h][v]);
        }
    }
    std::memcpy(out, total, sizeof total);
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

}  // namespace

void pad_keys(const float** keys, int count) {
    for (int k = count; k % kKeys; ++k) keys[k] = keys[count - 1];
}

void attend(const float* q, const float** keys, int count, const float* sink, int heads, int head_dim, float* scratch, float* out) {
    if (count == 0) {
        std::memset(out, 0, size_t(heads) * head_dim * sizeof(float));
        return;
    }
    pad_keys(keys, count);
    const float scale = 1.0f / std::sqrt(float(head_dim));
    for (int head = 0; head < heads; head += kLanes) {
        const float* query = q + int64_t(head) * head_dim;
        for (int k = 0; k < count; k += kKeys) {
            F8 scores[kKeys];
            score(query, keys + k, head_dim, scores);
            std::memcpy(scratch + k * kLanes, scores, sizeof scores);
        }
        const F8 total = soften(scratch, count, load<F8>(sink + head), scale);
        for (int d = 0; d < head_dim; d += 16 * kVectors) {
            F16 sums[kLanes][kVectors];
            weigh(scratch, keys, count, d, sums);
            for (int lane = 0; lane < std::min(kLanes, heads - head); ++lane) {
                for (int v = 0; v < kVectors; ++v) store(out + int64_t(head + lane) * head_dim + d + 16 * v, sums[lane][v] / total[lane]);
            }
        }
    }
}

void index_scores(const float* q, const float* weights, const float* const* keys, int count, int heads, int dim, float* scores) {
    for (int k = 0; k < count; k += kKeys) {
        F8 total[kKeys] = {};
        for (int head = 0; head < heads; head += kLanes) {
            float own[kLanes] = {};
            std::copy(weights + head, weights + std::min(heads, head + kLanes), own);
            const F8 weight = load<F8>(own);
            F8 products[kKeys];
            score(q + int64_t(head) * dim, keys + k, dim, products);
            for (int j = 0; j < kKeys; ++j) total[j] = fma(weight, maximum(F8{}, products[j]), total[j]);
        }
        for (int j = 0; j < std::min(kKeys, count - k); ++j) scores[k + j] = sum(total[j]);
    }
}

int select_top(const float* scores, int count, int limit, uint64_t* scratch, int32_t* picked) {
    int found = 0;
    for (int i = 0; i < count; ++i) {
        if (scores[i] == -INFINITY) continue;
        // Order-preserving bits: the highest score and, among equals, the lowest index come first. Adding zero makes -0 and 0 equal.
        const float value = scores[i] + 0.0f;
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        bits = bits & 0x80000000u ? bits : ~bits & 0x7FFFFFFFu;
        scratch[found++] = uint64_t(bits) << 32 | uint32_t(i);
    }
    if (found > limit) {
        std::nth_element(scratch, scratch + limit, scratch + found);
        found = limit;
    }
    for (int i = 0; i < found; ++i) picked[i] = int32_t(uint32_t(scratch[i]));
    std::sort(picked, picked + found);
    return found;
}

}  // namespace dix
