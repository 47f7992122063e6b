// Tokens of rows: the most likely one, a draw by seed and position, or a draft that is kept or refused.
#include "cpu_draws.h"

#include <algorithm>
#include <functional>

namespace dix {
namespace {

typedef double D8 __attribute__((vector_size(64)));
typedef uint64_t U8 __attribute__((vector_size(64)));
typedef unsigned __int128 Wide;

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr int kDrawBits = 53;
constexpr float kFixedOne = 2147483648.0f;  // probability 1 in fixed point; sums of a row stay below 2^32
constexpr int kBlock = 256;                 // ids between two looks at a running sum

enum Purpose { kSample = 0, kResidual = 1, kAccept = 2 };

// Finaliser of SplitMix64.
template <class T>
T mix(T x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

uint64_t stream(uint64_t seed, int64_t position, Purpose purpose) { return seed + mix((3 * uint64_t(position) + purpose) * kGolden); }

// 53 random bits.
uint64_t number(uint64_t seed, int64_t position, Purpose purpose) { return mix(stream(seed, position, purpose) + kGolden) >> (64 - kDrawBits); }

int padded(int count) { return (count + 15) / 16 * 16; }

// floor(p * 2^31).
U16 fixed(F16 p) { return __builtin_convertvector(p * kFixedOne, U16); }

uint64_t fixed(float p) { return uint64_t(p * kFixedOne); }

// Sum of the weights of `count` probabilities; what lies behind them is not read.
uint64_t total(const float* p, int count) {
    U16 sums = {};
    int v = 0;
    for (; v + 16 <= count; v += 16) sums += fixed(load<F16>(p + v));
    uint64_t all = 0;
    for (int lane = 0; lane < 16; ++lane) all += sums[lane];
    for (; v < count; ++v) all += fixed(p[v]);
    return all;
}

void softmax(const float* x, int count, float best, float temperature, float* p) {
    const F16 least = splat<F16>(-87.0f);  // below it weights are 0, and no race is ever won
    D8 sums = {};
    for (int v = 0; v < count; v += 16) {
        F16 own = splat<F16>(-INFINITY);
        std::memcpy(&own, x + v, std::min(16, count - v) * sizeof(float));
        F16 z = own - best;
        if (temperature != 1.0f) z /= temperature;
        const F16 e = z < least ? F16{} : exponential(z);
        sums += __builtin_convertvector(low(e), D8) + __builtin_convertvector(high(e), D8);
        store(p + v, e);
    }
    double sum = 0.0;
    for (int lane = 0; lane < 8; ++lane) sum += sums[lane];
    const float share = float(1.0 / sum);
    for (int v = 0; v < count; v += 16) store(p + v, load<F16>(p + v) * share);
}

// Keys that fall in the order of the filters: by probability, equals by id rising.
uint64_t key_of(float p, int id) {
    uint32_t bits;
    std::memcpy(&bits, &p, sizeof bits);
    return uint64_t(bits) << 32 | ~uint32_t(id);
}

float probability_of(uint64_t key) {
    const uint32_t bits = uint32_t(key >> 32);
    float p;
    std::memcpy(&p, &bits, sizeof p);
    return p;
}

uint64_t mass_of(const uint64_t* from, const uint64_t* to) {
    uint64_t mass = 0;
    for (; from < to; ++from) mass += fixed(probability_of(*from));
    return mass;
}

// The end of what top-p and top-k keep of `count` keys in any order; those before it are the first ones then.
uint64_t* partition(uint64_t* keys, int64_t count, uint64_t top_p, int64_t top_k) {
    uint64_t *first = keys, *last = keys + count, preceding = 0;
    while (last - first > 32) {
        uint64_t* const middle = first + (last - first) / 2;
        std::nth_element(first, middle, last, std::greater<>());
        const uint64_t mass = mass_of(first, middle);
        if (preceding + mass > top_p || middle - keys >= top_k) {
            last = middle;
        } else {
            preceding += mass;
            first = middle;
        }
    }
    std::sort(first, last, std::greater<>());
    while (first < last && preceding <= top_p && first - keys < top_k) preceding += fixed(probability_of(*first++));
    return first;
}

// Zero what the filters drop: in the order of falling probability, ties by lower id, each keeps a prefix. n: a multiple of 16.
//
// Only ids above some bound are looked at: they come first, so they are enough as soon as a filter ends among them or right behind.
void filter(float* p, int n, const Choice& c, Buffer<uint64_t>& buffer) {
    F16 most = {};
    for (int v = 0; v < n; v += 16) most = maximum(load<F16>(p + v), most);
    const float top = *std::max_element(&most[0], &most[0] + 16), least = c.min_p * top;
    uint64_t* keys = buffer.get(n + 1);
    int64_t count = 0;
    for (float bound = top / 64;; bound = bound < 1e-30f ? 0.0f : bound / 256) {
        const float from = std::max(bound, least);
        count = 0;
        for (int v = 0; v < n; v += 16) {
            if (sum((F16)((load<F16>(p + v) >= from) & 0x3F800000)) == 0.0f) continue;
            for (int i = v; i < v + 16; ++i) {
                keys[count] = key_of(p[i], i);
                count += p[i] >= from;
            }
        }
        if (bound <= least || count >= c.top_k || mass_of(keys, keys + count) > uint64_t(c.top_p)) break;
    }
    const uint64_t* const end = partition(keys, count, uint64_t(c.top_p), c.top_k);
    std::memset(p, 0, n * sizeof(float));
    for (const uint64_t* key = keys; key < end; ++key) p[~uint32_t(*key)] = probability_of(*key);
}

// The first id whose cumulated weight is above number / 2^53 of all.
int inverse_cdf(const float* p, int count, uint64_t number) {
    const uint64_t target = uint64_t((Wide(number) * total(p, count)) >> kDrawBits);
    uint64_t before = 0;
    for (int v = 0; v < count; v += kBlock) {
        const int end = std::min(count, v + kBlock);
        const uint64_t behind = before + total(p + v, end - v);
        if (behind <= target) {
            before = behind;
            continue;
        }
        for (int i = v; i < end; ++i) {
            before += fixed(p[i]);
            if (before > target) return i;
        }
    }
    return count - 1;  // no weights at all
}

// The id whose exponential waiting time -log(1 - u) / p ends first. The logarithm is never less than u: most ids are too late by that alone.
int race(const float* p, int count, uint64_t key) {
    const U8 first = {1, 2, 3, 4, 5, 6, 7, 8};
    double soonest = INFINITY;
    int winner = 0;
    for (int v = 0; v < padded(count); v += 16) {
        const F16 own = load<F16>(p + v);
        U8 bits[2];
        D8 late = {};
        for (int half = 0; half < 2; ++half) {
            bits[half] = mix(key + (first + uint64_t(v + 8 * half)) * kGolden) >> (64 - kDrawBits);
            const D8 share = __builtin_convertvector(half ? high(own) : low(own), D8);
            const D8 margin = __builtin_convertvector(bits[half], D8) * 0x1p-53 - soonest * share;
            late = half ? minimum(late, margin) : margin;
        }
        bool any = false;
        for (int lane = 0; lane < 8; ++lane) any |= !(late[lane] >= 0.0);
        for (int i = v; any && i < std::min(v + 16, count); ++i) {
            if (p[i] == 0.0f) continue;
            // The middle of the number's interval: never 0, so that no waiting time is 0.
            const double time = -std::log1p(-(double(bits[(i - v) / 8][i % 8]) + 0.5) * 0x1p-53) / p[i];
            if (time < soonest) {
                soonest = time;
                winner = i;
            }
        }
    }
    return winner;
}

// An id by weights max(wp * sum_q - wq * sum_p, 0), whose sum has up to 63 bits.
int draw_residual(const float* p, const float* q, int count, uint64_t sum_p, uint64_t sum_q, uint64_t number) {
    const auto weight = [&](int v) { return std::max<int64_t>(0, int64_t(fixed(p[v]) * sum_q) - int64_t(fixed(q[v]) * sum_p)); };
    uint64_t all = 0, before = 0;
    for (int v = 0; v < count; ++v) all += weight(v);
    const uint64_t target = uint64_t((Wide(number) * all) >> kDrawBits);
    for (int v = 0; v < count; ++v) {
        before += weight(v);
        if (before > target) return v;
    }
    return count - 1;  // no residual: a draft like this cannot be refused
}

// The draft with probability min(1, p / q), else a token of the residual.
int judge(const float* p, int count, const float* q, int vocab, int draft, const Choice& c, int row) {
    const uint64_t sum_p = total(p, count), sum_q = total(q, vocab), own_p = draft < count ? fixed(p[draft]) : 0;
    const uint64_t accept = number(c.seed, c.position + row, kAccept);
    // u < (wp / sum_p) / (wq / sum_q), multiplied out: at most 53 + 63 bits.
    if (Wide(accept) * fixed(q[draft]) * sum_p < (Wide(own_p) * sum_q) << kDrawBits) return draft;
    return draw_residual(p, q, count, sum_p, sum_q, number(c.seed, c.position + row, kResidual));
}

}  // namespace

int largest(const float* x, int count, float* value) {
    F16 best = splat<F16>(-INFINITY);
    I16 unordered = {};
    int i = 0;
    for (; i + 16 <= count; i += 16) {
        const F16 own = load<F16>(x + i);
        best = own > best ? own : best;
        unordered |= own != own;
    }
    float most[16], top = -INFINITY;
    store(most, best);
    bool nan = false;
    for (int lane = 0; lane < 16; ++lane) {
        top = std::max(top, most[lane]);
        nan |= unordered[lane] != 0;
    }
    for (; i < count; ++i) {
        top = std::max(top, x[i]);
        nan |= x[i] != x[i];
    }
    *value = nan ? NAN : top;
    return int(std::find_if(x, x + count, [&](float own) { return nan ? own != own : own == top; }) - x);
}

const float* distribution(const float* logits, int count, float best, const Choice& c, DrawScratch& scratch) {
    float* p = scratch.probs.get(padded(count));
    softmax(logits, count, best, c.temperature, p);
    if (c.top_p < 2 * int64_t(kFixedOne) || c.top_k < count || c.min_p > 0.0f) filter(p, padded(count), c, scratch.keys);
    return p;
}

int draw(const float* probs, int count, const Choice& c, int row) {
    if (c.mode == Mode::kRace) return race(probs, count, mix(stream(c.seed, c.position + row, kSample)));
    return inverse_cdf(probs, count, number(c.seed, c.position + row, kSample));
}

void choose_rows(const float* logits, int64_t distance, int count, const Choice* choices, int num_choices, const int32_t* drafts, int vocab,
                 DrawScratch& scratch, int32_t* ids, float* values) {
    for (const Choice* c = choices; c < choices + num_choices; ++c) {
        for (int row = 0; row < c->rows; ++row, ++ids, ++drafts, logits += distance) {
            float best;
            *ids = largest(logits, count, &best);
            if (values != nullptr) *values++ = best;
            if (c->mode == Mode::kGreedy || !std::isfinite(best)) continue;
            const float* p = distribution(logits, count, best, *c, scratch);
            const bool judged = *drafts >= 0 && c->proposal != nullptr;
            *ids = judged ? judge(p, count, c->proposal + int64_t(row) * vocab, vocab, *drafts, *c, row) : draw(p, count, *c, row);
        }
    }
}

}  // namespace dix

extern "C" int64_t dix_choice_bytes() { return sizeof(dix::Choice); }
