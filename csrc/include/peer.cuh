// Memory of the ranks of one host that write into each other's: where things are in it, and numbers that one device stores for another.
#pragma once

#include "warp.cuh"

namespace dix {

constexpr int kMostRanks = 8, kMostBlocks = 32;

// Every rank has memory of one layout: flags [ranks][kMostBlocks] of rows that came and of results that came home, one per block of
// their sender; a counter of its own; rows; results. `boxes[r]` is rank r's, as it is mapped here.
struct PeerMemory {
    unsigned char* boxes[kMostRanks];
    int64_t returned, counter, rows, home;  // bytes from the start, where the flags of rows are
    int rank, num_ranks;
    int64_t limit_ns;  // a kernel that waits longer ends with an error
};

#ifdef __CUDACC__

// What the threads of this block wrote before a barrier of the block can be read by who finds this number.
__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* flag) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

// Memory that others write while this kernel runs: no load of it may move in front of the wait, nor go through the cache of constants.
__device__ __forceinline__ uint32_t load_written(const uint32_t* word) { return *static_cast<const volatile uint32_t*>(word); }

__device__ __forceinline__ uint4 load_written16(const uint4* quad) {
    uint4 value;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(quad) : "memory");
    return value;
}

__device__ __forceinline__ int64_t nanoseconds() {
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void fail_kernel() { asm volatile("trap;"); }

#endif

// Ends when somebody has stored `value`. Flags only grow.
__device__ __forceinline__ void await(const uint64_t* flag, uint64_t value, int64_t limit_ns) {
    int64_t began = 0;
    for (unsigned polls = 0; load_acquire(flag) < value; ++polls) {
        if (polls % 1024 != 0) continue;  // the clock is slow to read
        const int64_t now = nanoseconds();
        if (began == 0) began = now;
        if (now - began > limit_ns) fail_kernel();
    }
}

// Tells all ranks that this block has written what it had for them, and waits until all blocks of all ranks have said so. All ranks
// launch equally many blocks. flags: bytes from the start of a rank's memory.
__device__ __forceinline__ void meet_peers(const PeerMemory& peers, int64_t flags, uint64_t trip) {
    const int blocks = static_cast<int>(gridDim.x), thread = static_cast<int>(threadIdx.x);
    sync_block();
    if (thread < peers.num_ranks) {
        auto* theirs = reinterpret_cast<uint64_t*>(peers.boxes[thread] + flags);
        store_release(theirs + peers.rank * kMostBlocks + blockIdx.x, trip);
    }
    const auto* mine = reinterpret_cast<const uint64_t*>(peers.boxes[peers.rank] + flags);
    for (int i = thread; i < peers.num_ranks * blocks; i += static_cast<int>(blockDim.x)) {
        await(mine + i / blocks * kMostBlocks + i % blocks, trip, peers.limit_ns);
    }
    sync_block();
}

}  // namespace dix
