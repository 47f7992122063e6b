// Numbers of all threads of a block, and of all blocks of a cluster, combined in an order that is always the same.
#pragma once

#include "warp.cuh"

namespace dix {

// `combine` over the numbers of all threads of the block. scratch: one number per warp.
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

// Brings a number of every block to all blocks: slots[r] is the one of rank r behind `sync_told`. Each array of slots serves once per row.
template <int kBlocks, class T>
__device__ __forceinline__ void tell_all(T value, T (&slots)[kBlocks]) {
    static_assert(kBlocks <= 32);
    if (threadIdx.x < kBlocks) *of_rank(slots + cluster_rank(), threadIdx.x) = value;
}

// Behind `tell_all`, and behind a barrier of the block for what its other threads wrote.
__device__ __forceinline__ void sync_told() { sync_cluster(threadIdx.x < 32); }

template <int kBlocks, class T, class Combine>
__device__ __forceinline__ T over_slots(const T (&slots)[kBlocks], Combine combine) {
    T all = slots[0];
    for (int rank = 1; rank < kBlocks; ++rank) all = combine(all, slots[rank]);
    return all;
}

// Sum over the threads before this one, and over all of them. scratch: one number per warp.
template <int kThreads, class T>
__device__ __forceinline__ T sum_before(T value, T* scratch, T& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T sum = value;
    for (int step = 1; step < 32; step *= 2) {
        const T below = shuffle_up(sum, step);
        sum += lane >= step ? below : 0;
    }
    sync_block();  // others may still read what was there
    if (lane == 31) scratch[warp] = sum;
    sync_block();
    T before = 0;
    total = 0;
    for (int other = 0; other < kThreads / 32; ++other) {
        if (other < warp) before += scratch[other];
        total += scratch[other];
    }
    return before + sum - value;
}
template <int kThreads, class T>
__device__ __forceinline__ T sum_before(T value, T* scratch) {
    T total;
    return sum_before<kThreads>(value, scratch, total);
}

// Places of `count` in their order, as many to every thread: [begin, end). An odd number, so that threads meet in no bank of shared memory.
struct Share {
    int begin, end;
};
template <int kThreads>
__host__ __device__ __forceinline__ int share_size(int count) {
    return (count + kThreads - 1) / kThreads | 1;
}
template <int kThreads>
__device__ __forceinline__ Share share_of(int count) {
    const int size = share_size<kThreads>(count), begin = static_cast<int>(threadIdx.x) * size, end = begin + size;
    return {begin < count ? begin : count, end < count ? end : count};
}

// Writes `value` to the same place of every block of the cluster.
template <int kBlocks, class T>
__device__ __forceinline__ void set_all(T* place, T value) {
    for (int rank = 0; rank < kBlocks; ++rank) *of_rank(place, rank) = value;
}

// Bits whose unsigned order is that of the fp32 numbers: NaN above all, -0 as 0.
__device__ __forceinline__ uint32_t ordered(float x) {
    const int bits = x == x ? bits_of(x + 0.0f) : 0x7FFFFFFF;
    return static_cast<uint32_t>(bits ^ (bits >> 31 & 0x7FFFFFFF)) ^ 0x80000000u;
}

// Starts copying fp32 numbers [4 v, 4 v + 4) of `count` to shared memory; behind the last of all it writes `filler`. aligned: of `from` to 16.
__device__ __forceinline__ void start_vector(float* values, int v, int count, const float* from, bool aligned, float filler) {
    if (aligned && 4 * v + 4 <= count) {
        copy_async16(values + 4 * v, from + 4 * v);
        return;
    }
    for (int place = 4 * v; place < 4 * v + 4; ++place) {
        if (place < count) {
            copy_async4(values + place, from + place);
        } else {
            values[place] = filler;
        }
    }
}

}  // namespace dix
