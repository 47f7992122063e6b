// What the sampling kernel is made of: its arguments, a row in the shared memory of a cluster, sums over its threads.
//
// A row's ids are cut into kPieces pieces, one for each thread block of a cluster. How they are cut does not depend on the other rows.
#pragma once

#include "warp.cuh"

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

// The better of two logits: NaN above all, then the larger, then the lower id.
__device__ __forceinline__ bool above(float a, int a_id, float b, int b_id) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan || b_nan) return a_nan && (!b_nan || a_id < b_id);
    return a > b || (a == b && a_id < b_id);
}

// A number that is larger for the better of two logits, and the logit and the id in it. -0 counts as 0.
__device__ __forceinline__ uint64_t rank_of(float logit, int id) {
    const int bits = logit == logit ? bits_of(logit + 0.0f) : 0x7FFFFFFF;
    const uint32_t ordered = static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7FFFFFFF)) ^ 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ float logit_of(uint64_t rank) {
    const int bits = static_cast<int>(static_cast<uint32_t>(rank >> 32) ^ 0x80000000u);
    return value_of(bits ^ (bits >> 31 & 0x7FFFFFFF));
}
__device__ __forceinline__ int id_of(uint64_t rank) { return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(rank)); }

// floor(p * 2^31); the numbers of a row add up to less than 2^32.
__device__ __forceinline__ uint32_t fixed_point(float probability) { return static_cast<uint32_t>(probability * 2147483648.0f); }

// One block's ids, four by four: vector v belongs to thread v % kThreads, and `values` holds their logits, then their exponentials.
struct Piece {
    float* values;
    int begin, count, vectors;

    __device__ __forceinline__ float4& vector(int v) const { return reinterpret_cast<float4*>(values)[v]; }
};

__device__ __forceinline__ int piece_size(int num_ids) { return (num_ids + 4 * kPieces - 1) / (4 * kPieces) * 4; }

__device__ __forceinline__ Piece piece_of(const SampleRows& p, float* values) {
    const int size = piece_size(p.num_ids), begin = cluster_rank() * size, left = p.num_ids - begin;
    const int count = left < 0 ? 0 : left < size ? left : size;
    return {values, begin, count, (count + 3) / 4};
}

__device__ __forceinline__ void start_vector(const Piece& piece, int v, const float* from, bool aligned) {
    if (aligned && 4 * v + 4 <= piece.count) {
        copy_async16(piece.values + 4 * v, from + 4 * v);
        return;
    }
    for (int place = 4 * v; place < 4 * v + 4; ++place) {
        if (place < piece.count) {
            copy_async4(piece.values + place, from + place);
        } else {
            piece.values[place] = -INFINITY;
        }
    }
}

// Vectors whose logits come first; the maximum of these is taken while the others are on their way.
template <int kThreads>
__device__ __forceinline__ int first_vectors(const Piece& piece) {
    return piece.vectors / (2 * kThreads) * kThreads;
}

// Everything that the thread reads later is under way when this returns, in two groups of copies.
template <int kThreads>
__device__ __forceinline__ void start_loads(const Piece& piece, const float* logits) {
    const float* from = logits + piece.begin;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
    const int first = first_vectors<kThreads>(piece);
    for (int v = threadIdx.x; v < first; v += kThreads) start_vector(piece, v, from, aligned);
    commit_copies();
    for (int v = first + threadIdx.x; v < piece.vectors; v += kThreads) start_vector(piece, v, from, aligned);
    commit_copies();
}

// `combine` over the numbers of all threads of the block, in an order that is always the same. scratch: one number per warp.
template <int kThreads, class T, class Combine>
__device__ __forceinline__ T over_block(T value, T* scratch, Combine combine) {
    for (int mask = 16; mask > 0; mask /= 2) value = combine(value, shuffle_xor(value, mask));
    sync_block();  // others may still read what was there
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    sync_block();
    T all = scratch[0];
    for (int warp = 1; warp < kThreads / 32; ++warp) all = combine(all, scratch[warp]);
    return all;
}

// Brings a number of every block to all blocks: slots[r] is the one of rank r. Each array of slots serves once per row.
template <class T>
__device__ __forceinline__ void tell_all(T value, T* slots) {
    if (threadIdx.x < kPieces) *of_rank(slots + cluster_rank(), threadIdx.x) = value;
}

template <class T, class Combine>
__device__ __forceinline__ T over_slots(const T* slots, Combine combine) {
    T all = slots[0];
    for (int rank = 1; rank < kPieces; ++rank) all = combine(all, slots[rank]);
    return all;
}

// Sum over the threads before this one. buffer: a number per thread.
template <int kThreads, class T>
__device__ __forceinline__ T sum_before(T value, T* buffer) {
    const int thread = threadIdx.x;
    sync_block();
    buffer[thread] = value;
    sync_block();
    for (int step = 1; step < kThreads; step *= 2) {
        const T below = thread >= step ? buffer[thread - step] : 0;
        sync_block();
        buffer[thread] += below;
        sync_block();
    }
    return buffer[thread] - value;
}

// Ids of a piece in their order, as many to every thread: [begin, end). An odd number, so that threads meet in no bank.
struct Share {
    int begin, end;
};
template <int kThreads>
__device__ __forceinline__ Share share_of(const Piece& piece) {
    const int size = (piece.count + kThreads - 1) / kThreads | 1, begin = static_cast<int>(threadIdx.x) * size, end = begin + size;
    return {begin < piece.count ? begin : piece.count, end < piece.count ? end : piece.count};
}

}  // namespace dix
