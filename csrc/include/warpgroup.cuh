// Products by warpgroups of SM90: 64 rows of weights from registers times up to 128 tokens in shared memory.
//
// The register operands and sums of a warp are those of mma.m16n8k16; the four warps of a group hold 16 rows each. A tile of tokens is
// [tokens][64] bf16, 128 bytes a row, whose 16-byte pieces change places with the row (piece ^ row % 8), from an address divisible by 1,024.
// Products of a group run behind its back: sums and operands belong to them between `group_begin` and `group_wait`.
#pragma once

#include "warp.cuh"

namespace dix {

// Dynamic shared memory from the first address divisible by kAlign on.
template <int kAlign>
__device__ __forceinline__ unsigned char* aligned_shared_memory() {
    const auto begin = reinterpret_cast<uintptr_t>(shared_memory());
    return shared_memory() + (kAlign - begin % kAlign) % kAlign;
}

#ifdef __CUDACC__

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DIX_WARPGROUPS 1
#endif

// What threads have copied to shared memory becomes visible to the group's products, for each thread that calls this before a barrier.
__device__ __forceinline__ void show_shared() {
#ifdef DIX_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void group_begin() {
#ifdef DIX_WARPGROUPS
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void group_commit() {
#ifdef DIX_WARPGROUPS
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Until all but the last `kPending` committed groups of products are over.
template <int kPending>
__device__ __forceinline__ void group_wait() {
#ifdef DIX_WARPGROUPS
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Describes columns 16 * step.. of a tile to the products: its address and the 1,024 bytes between groups of eight rows, in units of 16 bytes,
// and the exchange of pieces within 128 bytes.
__device__ __forceinline__ uint64_t tokens_at(const unsigned char* tile, int step) {
    const uint64_t address = (static_cast<uint32_t>(__cvta_generic_to_shared(tile)) + 32 * step) >> 4;
    return (address & 0x3FFF) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

#define DIX_SUMS(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])

// d += a b, or d = a b, for 16 columns of a tile of 16 * kPairs tokens.
template <int kPairs, bool kAdd = true, int kSize>
__device__ __forceinline__ void group_multiply(float (&d)[kSize][4], const uint32_t (&a)[4], const unsigned char* tile, int step) {
#ifdef DIX_WARPGROUPS
    const uint64_t tokens = tokens_at(tile, step);
    if constexpr (kPairs == 2) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %21, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
            "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
            : DIX_SUMS(0), DIX_SUMS(1), DIX_SUMS(2), DIX_SUMS(3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "n"(kAdd ? 1 : 0));
    } else if constexpr (kPairs == 3) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %29, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23"
            "}, {%24, %25, %26, %27}, %28, p, 1, 1, 0; }"
            : DIX_SUMS(0), DIX_SUMS(1), DIX_SUMS(2), DIX_SUMS(3), DIX_SUMS(4), DIX_SUMS(5)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "n"(kAdd ? 1 : 0));
    } else if constexpr (kPairs == 4) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
            : DIX_SUMS(0), DIX_SUMS(1), DIX_SUMS(2), DIX_SUMS(3), DIX_SUMS(4), DIX_SUMS(5), DIX_SUMS(6), DIX_SUMS(7)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "n"(kAdd ? 1 : 0));
    } else if constexpr (kPairs == 5) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %45, 0; "
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39"
            "}, {%40, %41, %42, %43}, %44, p, 1, 1, 0; }"
            : DIX_SUMS(0), DIX_SUMS(1), DIX_SUMS(2), DIX_SUMS(3), DIX_SUMS(4), DIX_SUMS(5), DIX_SUMS(6), DIX_SUMS(7),
              DIX_SUMS(8), DIX_SUMS(9)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "n"(kAdd ? 1 : 0));
    } else if constexpr (kPairs == 8) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %69, 0; "
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
            : DIX_SUMS(0), DIX_SUMS(1), DIX_SUMS(2), DIX_SUMS(3), DIX_SUMS(4), DIX_SUMS(5), DIX_SUMS(6), DIX_SUMS(7),
              DIX_SUMS(8), DIX_SUMS(9), DIX_SUMS(10), DIX_SUMS(11), DIX_SUMS(12), DIX_SUMS(13), DIX_SUMS(14), DIX_SUMS(15)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "n"(kAdd ? 1 : 0));
    }
#endif
}

#undef DIX_SUMS

#else  // a CPU, lane by lane

inline void show_shared() {}
inline void group_begin() {}
inline void group_commit() {}
template <int>
void group_wait() {}

template <int kPairs, bool kAdd = true, int kSize>
void group_multiply(float (&d)[kSize][4], const uint32_t (&a)[4], const unsigned char* tile, int step) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int j = 0; j < 2 * kPairs; ++j) {
        uint32_t b[2];
        for (int half = 0; half < 2; ++half) {
            b[half] = load<uint32_t>(tile + (8 * j + g) * 128 + ((2 * step + half) ^ g) * 16 + t * 4);
        }
        if (!kAdd) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
        mma_bf16(d[j], a, b[0], b[1]);
    }
}

#endif

}  // namespace dix
