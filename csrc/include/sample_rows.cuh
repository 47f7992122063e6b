// What the sampling kernel is made of: its arguments, and a row in the shared memory of a cluster.
//
// A row's ids are cut into kPieces pieces, one for each thread block of a cluster. How they are cut does not depend on the other rows.
#pragma once

#include "cluster.cuh"

#include <cmath>

namespace dix {

constexpr int kPieces = 8;  // blocks of a cluster: the most that every device allows
enum Mode { kGreedy = 0, kRace = 1, kInverse = 2 };

struct SampleRows {
    const float* logits;       // [R, V], rows row_stride apart
    const float* temperature;  // [R], above 0 in drawn rows
    const int* modes;          // [R]
    const int64_t* numbers;    // [R] key of a race, or 53 random bits
    int64_t* ids;              // [R] results
    float* best;               // [R] largest logit of each row; NaN when one is NaN
    const int64_t* top_p;      // [R] in fixed point, or null where no row has a filter; 2^32 for none
    const int* top_k;          // [R]; num_ids for none
    const float* min_p;        // [R]; 0 for none
    int64_t row_stride;
    int num_rows, num_ids;
};

constexpr int kNoId = 0x7FFFFFFF;
constexpr int64_t kNoLimit = int64_t{1} << 32;  // of top_p: no weight of a row is as much

// The better of two logits: NaN above all, then the larger, then the lower id.
__device__ __forceinline__ bool above(float a, int a_id, float b, int b_id) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan || b_nan) return a_nan && (!b_nan || a_id < b_id);
    return a > b || (a == b && a_id < b_id);
}

// A number that is larger for the better of two logits, and the logit and the id in it. -0 counts as 0.
__device__ __forceinline__ uint64_t rank_of(float logit, int id) {
    return static_cast<uint64_t>(ordered(logit)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ float logit_of(uint64_t rank) {
    const int bits = static_cast<int>(static_cast<uint32_t>(rank >> 32) ^ 0x80000000u);
    return value_of(bits ^ (bits >> 31 & 0x7FFFFFFF));
}
__device__ __forceinline__ int id_of(uint64_t rank) { return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(rank)); }

// floor(p * 2^31); the numbers of a row add up to less than 2^32.
__device__ __forceinline__ uint32_t fixed_point(float probability) { return static_cast<uint32_t>(probability * 2147483648.0f); }

// floor(number / 2^53 * total) without overflow: 31 high bits and 22 low bits of the number.
__device__ __forceinline__ int64_t share_of_total(int64_t number, int64_t total) {
    return ((number >> 22) * total + (((number & ((1 << 22) - 1)) * total) >> 22)) >> 31;
}

// One block's ids, four by four: vector v belongs to thread v % kThreads, and `values` holds their logits, then their exponentials.
struct Piece {
    float* values;
    int begin, count, vectors;

    __device__ __forceinline__ float4& vector(int v) const { return reinterpret_cast<float4*>(values)[v]; }
};

__host__ __device__ __forceinline__ int piece_size(int num_ids) { return (num_ids + 4 * kPieces - 1) / (4 * kPieces) * 4; }

__device__ __forceinline__ Piece piece_of(const SampleRows& p, float* values) {
    const int size = piece_size(p.num_ids), begin = cluster_rank() * size, left = p.num_ids - begin;
    const int count = left < 0 ? 0 : left < size ? left : size;
    return {values, begin, count, (count + 3) / 4};
}

// A row is copied in groups of vectors; while one is worked on the others are on their way. Where group `number` begins.
constexpr int kGroups = 4;
template <int kThreads>
__device__ __forceinline__ int group_begin(const Piece& piece, int number) {
    const int begin = (piece.vectors + kThreads - 1) / kThreads * number / kGroups * kThreads;
    return begin < piece.vectors ? begin : piece.vectors;
}

// Everything that the thread reads later is under way when this returns.
template <int kThreads>
__device__ __forceinline__ void start_loads(const Piece& piece, const float* logits) {
    const float* from = logits + piece.begin;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
    for (int group = 0; group < kGroups; ++group) {
        const int end = group_begin<kThreads>(piece, group + 1);
        for (int v = group_begin<kThreads>(piece, group) + threadIdx.x; v < end; v += kThreads) {
            start_vector(piece.values, v, piece.count, from, aligned, -INFINITY);
        }
        commit_copies();
    }
}

__device__ __forceinline__ void wait_for_group(int number) {
    static_assert(kGroups == 4);
    if (number == 0) wait_copies<3>();
    if (number == 1) wait_copies<2>();
    if (number == 2) wait_copies<1>();
    if (number == 3) wait_copies<0>();
}

// The best logit that a thread has seen.
struct Best {
    float logit = -INFINITY;
    int id = kNoId;
};

template <int kThreads>
__device__ __forceinline__ void look_for_best(const Piece& piece, int begin, int end, Best& best) {
    for (int v = begin + static_cast<int>(threadIdx.x); v < end; v += kThreads) {
        const float4 x = piece.vector(v);
        const float most = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), sum = (x.x + x.y) + (x.z + x.w);
        if (!(most > best.logit) && sum == sum) continue;  // a NaN shows in the sum
        const float four[4] = {x.x, x.y, x.z, x.w};
        for (int i = 0; i < 4; ++i) {
            const int here = piece.begin + 4 * v + i;
            if (above(four[i], here, best.logit, best.id)) best = {four[i], here};
        }
    }
}

// What blocks of a cluster tell each other, and room for sums over a block.
template <int kThreads>
struct alignas(16) Board {
    uint64_t tops[kPieces], top_scratch[kThreads / 32];
    uint64_t times[kPieces], time_scratch[kThreads / 32];  // bits of positive doubles are in their order
    float sums[kPieces], sum_scratch[kThreads / 32];
    int time_ids[kPieces], id_scratch[kThreads / 32];
    uint32_t weights[kPieces], weight_scratch[kThreads / 32];
    uint32_t buffer[kThreads];
    int64_t left;
    int share, found;
};

}  // namespace dix
