// One token per row of logits without sorting and without the host: the largest logit, or a draw from the tempered distribution with
// given random numbers (engine/draws.py is the definition).
//
// Three launches. `survey` finds each row's maximum and the sum of its exponentials, `weigh` turns logits into probabilities on the way
// and lets them race, or adds their fixed-point weights, `decide` picks. Rows are cut into kSplits pieces of ids; what the pieces find
// is combined in their order, so a row's token depends on that row alone.
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

__global__ void __launch_bounds__(kSampleThreads) survey(const SampleRows p) {
    const int row = blockIdx.x / kSplits, split = blockIdx.x % kSplits, thread = threadIdx.x;
    const float* logits = p.logits + row * p.row_stride;
    const Piece piece = piece_of(p.num_ids, split);
    const float temperature = p.modes[row] == kGreedy ? 1.0f : p.temperature[row];
    float top = -INFINITY, sum = 0;
    int top_id = 0x7FFFFFFF;
    for (int id = piece.begin + thread; id < piece.end; id += kSampleThreads) {
        const float logit = logits[id];
        if (above(logit, id, top, top_id)) {
            sum = rescaled(sum, top, logit, temperature) + (logit > -INFINITY ? 1.0f : 0.0f);
            top = logit;
            top_id = id;
        } else if (logit > -INFINITY) {
            sum += expf((logit - top) / temperature);
        }
    }
    float* tops = reinterpret_cast<float*>(shared_memory());
    float* sums = tops + kSampleThreads;
    int* ids = reinterpret_cast<int*>(sums + kSampleThreads);
    tops[thread] = top;
    sums[thread] = sum;
    ids[thread] = top_id;
    for (int half = kSampleThreads / 2; half > 0; half /= 2) {
        sync_block();
        if (thread < half) {
            const int other = thread + half;
            const bool theirs = above(tops[other], ids[other], tops[thread], ids[thread]);
            const float high = theirs ? tops[other] : tops[thread];
            sums[thread] = rescaled(sums[thread], tops[thread], high, temperature) + rescaled(sums[other], tops[other], high, temperature);
            tops[thread] = high;
            ids[thread] = theirs ? ids[other] : ids[thread];
        }
    }
    if (thread == 0) {
        const int at = row * kSplits + split;
        p.tops[at] = tops[0];
        p.top_ids[at] = ids[0];
        p.sums[at] = sums[0];
    }
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

__device__ __forceinline__ uint64_t number_of(int64_t key, int id) {
    uint64_t x = static_cast<uint64_t>(key) + (static_cast<uint64_t>(id) + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return (x ^ (x >> 31)) >> 11;
}

__device__ __forceinline__ int64_t fixed_point(float probability) { return static_cast<int64_t>(probability * 2147483648.0f); }

__global__ void __launch_bounds__(kSampleThreads) weigh(const SampleRows p) {
    const int row = blockIdx.x / kSplits, split = blockIdx.x % kSplits, thread = threadIdx.x, mode = p.modes[row];
    if (mode == kGreedy) return;
    const float* logits = p.logits + row * p.row_stride;
    const Piece piece = piece_of(p.num_ids, split);
    const float temperature = p.temperature[row];
    const Summary all = summarise(p, row, temperature);
    unsigned char* shared = shared_memory();
    if (mode == kInverse) {
        int64_t* sums = reinterpret_cast<int64_t*>(shared);
        int64_t sum = 0;
        for (int id = piece.begin + thread; id < piece.end; id += kSampleThreads) {
            sum += fixed_point(expf((logits[id] - all.top) / temperature) / all.sum);
        }
        sums[thread] = sum;
        for (int half = kSampleThreads / 2; half > 0; half /= 2) {
            sync_block();
            if (thread < half) sums[thread] += sums[thread + half];
        }
        if (thread == 0) p.weights[row * kSplits + split] = sums[0];
        return;
    }
    const int64_t key = p.numbers[row];
    double best = INFINITY;
    float bar = INFINITY;  // what a time in fp32 has to stay below to be worth the exact one
    int best_id = 0x7FFFFFFF;
    for (int id = piece.begin + thread; id < piece.end; id += kSampleThreads) {
        const float probability = expf((logits[id] - all.top) / temperature) / all.sum;
        const uint64_t number = number_of(key, id);
        const float rough = static_cast<float>(number) * 1.1102230246251565e-16f;  // 2^-53
        // Close to 1 the rough number has too few digits for its logarithm.
        if (rough < 0.999f && -log1pf(-rough) > bar * probability) continue;
        if (!(probability > 0.0f)) continue;
        const double time = -log1p(-((static_cast<double>(number) + 0.5) * 0x1p-53)) / static_cast<double>(probability);
        if (time < best || (time == best && id < best_id)) {
            best = time;
            best_id = id;
            bar = static_cast<float>(time) * 1.0001f;
        }
    }
    double* times = reinterpret_cast<double*>(shared);
    int* ids = reinterpret_cast<int*>(times + kSampleThreads);
    times[thread] = best;
    ids[thread] = best_id;
    for (int half = kSampleThreads / 2; half > 0; half /= 2) {
        sync_block();
        if (thread < half) {
            const int other = thread + half;
            if (times[other] < times[thread] || (times[other] == times[thread] && ids[other] < ids[thread])) {
                times[thread] = times[other];
                ids[thread] = ids[other];
            }
        }
    }
    if (thread == 0) {
        p.times[row * kSplits + split] = times[0];
        p.time_ids[row * kSplits + split] = ids[0];
    }
}

// The first id of a piece whose cumulated weight exceeds what is left of the target.
__device__ __forceinline__ int locate(const SampleRows& p, int row, int split, int64_t left, const Summary& all, float temperature) {
    const float* logits = p.logits + row * p.row_stride;
    const Piece piece = piece_of(p.num_ids, split);
    const int thread = threadIdx.x, share = (piece.end - piece.begin + kSampleThreads - 1) / kSampleThreads;
    const int begin = piece.begin + thread * share, end = begin + share < piece.end ? begin + share : piece.end;
    const auto weight = [&](int id) { return fixed_point(expf((logits[id] - all.top) / temperature) / all.sum); };
    int64_t* sums = reinterpret_cast<int64_t*>(shared_memory());
    int* found = reinterpret_cast<int*>(sums + kSampleThreads);
    int64_t sum = 0;
    for (int id = begin; id < end; ++id) sum += weight(id);
    sums[thread] = sum;
    if (thread == 0) *found = piece.end - 1;
    sync_block();
    int64_t before = 0;
    for (int other = 0; other < thread; ++other) before += sums[other];
    if (before <= left && left < before + sum) {
        int id = begin;
        for (int64_t passed = before; id < end; ++id) {
            passed += weight(id);
            if (passed > left) break;
        }
        *found = id;
    }
    sync_block();
    return *found;
}

__global__ void __launch_bounds__(kSampleThreads) decide(const SampleRows p) {
    const int row = blockIdx.x, thread = threadIdx.x, mode = p.modes[row];
    const float temperature = mode == kGreedy ? 1.0f : p.temperature[row];
    const Summary all = summarise(p, row, temperature);
    int id = all.id;
    if (mode == kRace && all.top == all.top) {
        double best = INFINITY;
        for (int s = 0; s < kSplits; ++s) {
            const double time = p.times[row * kSplits + s];
            if (time < best) {
                best = time;
                id = p.time_ids[row * kSplits + s];
            }
        }
    } else if (mode == kInverse && all.top == all.top) {
        int64_t total = 0;
        for (int s = 0; s < kSplits; ++s) total += p.weights[row * kSplits + s];
        const int64_t number = p.numbers[row];
        // floor(number / 2^53 * total) without overflow: 31 high bits and 22 low bits of the number.
        int64_t left = ((number >> 22) * total + (((number & ((1 << 22) - 1)) * total) >> 22)) >> 31;
        int split = 0;
        while (split < kSplits - 1 && left >= p.weights[row * kSplits + split]) left -= p.weights[row * kSplits + split++];
        id = locate(p, row, split, left, all, temperature);
    }
    if (thread == 0) {
        // A row without a finite maximum has no token; the id has to exist all the same.
        p.ids[row] = id >= 0 && id < p.num_ids ? id : 0;
        p.best[row] = all.top;
    }
}

}  // namespace dix

// Returns a cudaError_t.
extern "C" int dix_sample_rows(const dix::SampleRows* p, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (p->num_ids < 1) return cudaErrorInvalidValue;
    if (p->num_rows == 0) return cudaSuccess;
    DIX_LAUNCH(survey, p->num_rows * kSplits, kSampleThreads, kSampleThreads * 12, s, *p);
    DIX_LAUNCH(weigh, p->num_rows * kSplits, kSampleThreads, kSampleThreads * 12, s, *p);
    DIX_LAUNCH(decide, p->num_rows, kSampleThreads, kSampleThreads * 8 + 8, s, *p);
    return cudaGetLastError();
}
