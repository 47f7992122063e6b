// What the sampling kernels share: the arguments, the summary of a row, and the probability of an id under its row's filters.
#pragma once

#include "warp.cuh"

#include <cmath>

namespace dix {

constexpr int kSampleThreads = 256;
constexpr int kSplits = 16;
enum Mode { kGreedy = 0, kRace = 1, kInverse = 2 };

struct SampleRows {
    const float* logits;       // [R, V], rows row_stride apart
    const float* temperature;  // [R], above 0 in drawn rows
    const int* modes;          // [R]
    const int64_t* numbers;    // [R] key of a race, or 53 random bits
    int64_t* ids;              // [R] results
    float* best;               // [R] largest logit of each row; NaN when one is NaN
    float* tops;               // [R, kSplits] maximum of each piece
    int* top_ids;              // [R, kSplits]
    float* sums;               // [R, kSplits] sum of exp((logit - top) / temperature)
    double* times;             // [R, kSplits] shortest waiting time of each piece
    int* time_ids;             // [R, kSplits]
    int64_t* weights;          // [R, kSplits] sum of fixed-point weights of each piece
    const int64_t* top_p;      // [R] in fixed point, or null where no row has a filter; 2^32 for none
    const int* top_k;          // [R]; num_ids for none
    const float* min_p;        // [R]; 0 for none
    int* cuts;                 // [R, 2] bits of the least probability that stays, and the last id that stays at it
    int64_t row_stride;
    int num_rows, num_ids;
};

// The better of two logits: NaN above all, then the larger, then the lower id.
__device__ __forceinline__ bool above(float a, int a_id, float b, int b_id) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan || b_nan) return a_nan && (!b_nan || a_id < b_id);
    return a > b || (a == b && a_id < b_id);
}

struct Piece {
    int begin, end;
};

__device__ __forceinline__ Piece piece_of(int num_ids, int split) {
    const int size = (num_ids + kSplits - 1) / kSplits, begin = split * size;
    return {begin, begin + size < num_ids ? begin + size : num_ids};
}

// A sum of exp((x - from) / temperature) relative to another maximum. Both may be -inf, and then their difference is no number.
__device__ __forceinline__ float rescaled(float sum, float from, float to, float temperature) {
    return from == to || sum == 0.0f ? sum : sum * expf((from - to) / temperature);
}

// Calls `use` with every id of [begin, end) that is this thread's, and its logit. Several logits are under way at a time.
template <class Use>
__device__ __forceinline__ void for_logits(const float* logits, int begin, int end, int num_threads, Use use) {
    constexpr int kAtOnce = 8;
    int id = begin + static_cast<int>(threadIdx.x);
    for (; id + (kAtOnce - 1) * num_threads < end; id += kAtOnce * num_threads) {
        float values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) values[i] = logits[id + i * num_threads];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) use(id + i * num_threads, values[i]);
    }
    for (; id < end; id += num_threads) use(id, logits[id]);
}

struct Summary {
    float top, sum;
    int id;
};

// A row's maximum, where it is, and the sum of exponentials, from its pieces.
__device__ __forceinline__ Summary summarise(const SampleRows& p, int row, float temperature) {
    Summary all = {-INFINITY, 0.0f, 0x7FFFFFFF};
    for (int s = 0; s < kSplits; ++s) {
        const float top = p.tops[row * kSplits + s];
        const int id = p.top_ids[row * kSplits + s];
        if (above(top, id, all.top, all.id)) {
            all.top = top;
            all.id = id;
        }
    }
    for (int s = 0; s < kSplits; ++s) all.sum += rescaled(p.sums[row * kSplits + s], p.tops[row * kSplits + s], all.top, temperature);
    return all;
}

__device__ __forceinline__ int64_t fixed_point(float probability) { return static_cast<int64_t>(probability * 2147483648.0f); }

// The probability of an id, 0 when a filter drops it.
struct Probabilities {
    float per_temperature, top, per_sum, least;
    int cut, cut_id;

    __device__ __forceinline__ float all(float logit) const { return expf((logit - top) * per_temperature) * per_sum; }
    __device__ __forceinline__ float operator()(int id, float logit) const {
        const float p = all(logit);
        const int bits = bits_of(p);
        return (bits > cut || (bits == cut && id <= cut_id)) && p >= least ? p : 0.0f;
    }
};

__device__ __forceinline__ Probabilities probabilities_of(const SampleRows& p, int row, const Summary& all, float temperature) {
    Probabilities result = {1.0f / temperature, all.top, 1.0f / all.sum, 0.0f, 0, 0x7FFFFFFF};
    if (p.top_p != nullptr) {
        result.cut = p.cuts[2 * row];
        result.cut_id = p.cuts[2 * row + 1];
        result.least = p.min_p[row] * result.per_sum;  // the largest probability is exp(0) of the sum
    }
    return result;
}

}  // namespace dix
