// The few machine operations that kernels of packed weights need, with names. Sources that use only these also compile for a CPU,
// where tests run them lane by lane (tests/csrc/emulator.h stands in for the GPU).
#pragma once

#include <cstdint>

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define DIX_LAUNCH(kernel, grid, block, shared, stream, ...) kernel<<<(grid), (block), (shared), (stream)>>>(__VA_ARGS__)
// Of a kernel whose blocks wait for each other: few enough to run at once, whatever else does.
#define DIX_LAUNCH_TOGETHER DIX_LAUNCH
// Of a kernel that is declared with DIX_CLUSTER(cluster): so many consecutive blocks run together and reach each other's shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define DIX_CLUSTER(size)
#else
#define DIX_CLUSTER(size) __cluster_dims__(size)
#endif
#define DIX_LAUNCH_CLUSTERS(kernel, cluster, grid, block, shared, stream, ...) DIX_LAUNCH(kernel, grid, block, shared, stream, __VA_ARGS__)

namespace dix {

__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(16) unsigned char bytes[];
    return bytes;
}

// A lane's own copy to shared memory: only the lane that issued it may read the result, after `wait_copies`.
__device__ __forceinline__ void copy_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async4(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async8(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(const void* shared) { return *static_cast<const uint4*>(shared); }
__device__ __forceinline__ uint2 load_shared8(const void* shared) { return *static_cast<const uint2*>(shared); }
__device__ __forceinline__ uint4 load_global16(const void* global) { return __ldg(static_cast<const uint4*>(global)); }
__device__ __forceinline__ uint2 load_global8(const void* global) { return __ldg(static_cast<const uint2*>(global)); }

// d += a b for one 16x8x16 tile of bf16. Lane 4g + t holds rows g and g + 8 of a, column g of b, rows g and g + 8, columns 2t, 2t + 1 of d.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two bf16 products, subnormal numbers included.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) { return __byte_perm(low, high, selector); }
__device__ __forceinline__ uint32_t rotate_left(uint32_t x, int bits) { return __funnelshift_l(x, x, bits); }
__device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
// The low 32 bits of high:low shifted right by less than 32.
__device__ __forceinline__ uint32_t shift_right(uint32_t low, uint32_t high, int bits) { return __funnelshift_r(low, high, bits); }
__device__ __forceinline__ float bf16_round(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
__device__ __forceinline__ uint16_t bf16_bits(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ __forceinline__ float bf16_value(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ __forceinline__ int atomic_add_shared(int* counter, int value) { return atomicAdd(counter, value); }
__device__ __forceinline__ void atomic_add_shared(unsigned* counter, unsigned value) { atomicAdd(counter, value); }
__device__ __forceinline__ float quick_log(float x) { return __logf(x); }
__device__ __forceinline__ float power_of_two(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ int bits_of(float x) { return __float_as_int(x); }
__device__ __forceinline__ float value_of(int bits) { return __int_as_float(bits); }
template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int mask) {
    return __shfl_xor_sync(0xFFFFFFFFu, x, mask);
}
// From the lane so many below; its own number where there is none.
template <class T>
__device__ __forceinline__ T shuffle_up(T x, int lanes) {
    return __shfl_up_sync(0xFFFFFFFFu, x, lanes);
}
__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xFFFFFFFFu, x); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }

// Clusters exist from SM90 on; kernels that use them trap elsewhere and are not launched there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void sync_cluster(bool) { asm volatile("trap;"); }
template <class T>
__device__ __forceinline__ T* of_rank(T* shared, int) {
    return shared;
}
#else
__device__ __forceinline__ int cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// All threads of the cluster come, and find what those that `tell` wrote for them before, also in their own shared memory, and what had come
// to those over a barrier of their block. The fence that this takes is slow, so threads that wrote nothing leave it out. tells: of a warp.
__device__ __forceinline__ void sync_cluster(bool tells) {
    if (tells) {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    } else {
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another block of the cluster.
template <class T>
__device__ __forceinline__ T* of_rank(T* shared, int rank) {
    T* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
    return there;
}
#endif

}  // namespace dix

#else
#include "emulator.h"
#endif
