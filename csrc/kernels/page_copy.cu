// Gather or scatter of equal rows between device memory and mapped host memory.
//
// Row first[i] of `source` goes to row second[i] of `target`. Either side may be host memory: the threads read or write it over the
// bus. All rows form one flat range of 16-byte vectors, so that the same number of loads is in flight for rows of any size:
// 8 thread blocks keep 512 KiB under way, which covers the latency of PCIe 5, and leave the other multiprocessors to the model.
// A warp reads 2 KiB without a gap: the bus likes it better than the stripes of a whole block (0.937 against 0.92 of a pinned copy).
// The row numbers travel as a kernel argument, which the launch copies: no buffer of theirs can be overwritten while it is in use.
//
// source, target: 16-byte aligned, strides and row_bytes multiples of 16. first, second: host memory, free again on return.
// Rows of one call are distinct on the target side. count == 0 launches nothing. Returns a cudaError_t.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kThreads = 1024;
constexpr int kUnroll = 4;
constexpr int kWarp = 32;
constexpr int kFewRows = 128;    // 1 KiB of argument: what a decode step stores, launched fastest
constexpr int kSomeRows = 1024;  // 8 KiB
constexpr int kManyRows = 4064;  // 32 KiB of argument, the most that a launch takes

__device__ __forceinline__ uint4 load_once(const uint4* address) {
    uint4 value;
    // Each byte is read once: keep it out of L1, which the model uses.
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

__device__ __forceinline__ void store_once(uint4* address, uint4 value) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// The launches of one call follow each other without a gap: the next one begins while the last steps of this one are under way, and ends
// after it.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <int kRows>
struct Rows {
    int2 at[kRows];  // source row, target row
};

template <int kRows>
__global__ void __launch_bounds__(kThreads) page_copy(const char* source, char* target, int64_t source_stride, int64_t target_stride,
                                                      unsigned row_vectors, int count, const __grid_constant__ Rows<kRows> rows) {
    const unsigned total = count * row_vectors;
    const unsigned first = (blockIdx.x * kThreads + threadIdx.x / kWarp * kWarp) * kUnroll + threadIdx.x % kWarp;
    const unsigned step = gridDim.x * kThreads * kUnroll;
    for (unsigned begin = first; begin < total; begin += step) {
        if (begin + step >= total) let_next_begin();
        uint4 values[kUnroll];
        uint4* places[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const unsigned vector = begin + u * kWarp;
            if (vector >= total) break;
            const unsigned row = vector / row_vectors, offset = vector - row * row_vectors;
            const int2 pair = rows.at[row];
            values[u] = load_once(reinterpret_cast<const uint4*>(source + pair.x * source_stride) + offset);
            places[u] = reinterpret_cast<uint4*>(target + pair.y * target_stride) + offset;
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (begin + u * kWarp >= total) break;
            store_once(places[u], values[u]);
        }
    }
    wait_for_last();
}

struct Call {
    const char* source;
    char* target;
    int64_t source_stride, target_stride;
    unsigned row_vectors;
    int num_blocks;
    cudaStream_t stream;
};

// follows: another launch of the same call, which nothing depends on.
template <int kRows>
cudaError_t launch(const Call& call, const int* first, const int* second, int count, bool follows) {
    Rows<kRows> rows;
    for (int i = 0; i < count; ++i) rows.at[i] = make_int2(first[i], second[i]);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(call.num_blocks);
    config.blockDim = dim3(kThreads);
    config.stream = call.stream;
    config.attrs = &attribute;
    config.numAttrs = follows ? 1 : 0;
    return cudaLaunchKernelEx(&config, page_copy<kRows>, call.source, call.target, call.source_stride, call.target_stride, call.row_vectors, count, rows);
}

}  // namespace

// follows: 1 when the call before on this stream was a part of the same copy; needs SM90.
extern "C" int dix_page_copy(const void* source, void* target, const int* first, const int* second, int count, int64_t source_stride,
                             int64_t target_stride, int64_t row_bytes, int num_blocks, int follows, void* stream) {
    if (count == 0) return cudaSuccess;
    const auto unaligned = reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target) | source_stride | target_stride | row_bytes;
    // The flat vector number of a launch has to fit 32 bits.
    if (count < 0 || num_blocks < 1 || row_bytes <= 0 || unaligned % 16 != 0 || row_bytes / 16 > UINT32_MAX / kManyRows / 2) return cudaErrorInvalidValue;
    const Call call{static_cast<const char*>(source), static_cast<char*>(target),        source_stride, target_stride,
                    static_cast<unsigned>(row_bytes / 16), num_blocks, static_cast<cudaStream_t>(stream)};
    for (int done = 0; done < count;) {
        const int now = std::min(count - done, kManyRows);
        const auto run = now <= kFewRows ? launch<kFewRows> : now <= kSomeRows ? launch<kSomeRows> : launch<kManyRows>;
        const auto status = run(call, first + done, second + done, now, follows != 0);
        if (status != cudaSuccess) return status;
        done += now;
    }
    return cudaSuccess;
}
