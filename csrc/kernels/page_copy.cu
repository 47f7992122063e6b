// Gather or scatter of equal rows between device memory and mapped host memory, in one launch.
//
// Row pairs[i].x of `source` goes to row pairs[i].y of `target`. Either side may be host memory: the threads read or write it over
// the bus. All rows form one flat range of 16-byte vectors, so that the same number of loads is in flight for rows of any size:
// 8 thread blocks keep 512 KiB under way, which covers the latency of PCIe 5, and leave the other multiprocessors to the model.
//
// source, target: 16-byte aligned, strides and row_bytes multiples of 16. pairs: device-readable, valid until the launch completes.
// Rows of one launch are distinct on the target side. count == 0 launches nothing. Returns a cudaError_t.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 1024;
constexpr int kUnroll = 4;
constexpr int kTile = 2048;  // pairs kept in shared memory: 16 KiB

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

__global__ void __launch_bounds__(kThreads) page_copy(const char* source, char* target, const int2* pairs, int count, int64_t source_stride,
                                                      int64_t target_stride, unsigned row_vectors) {
    __shared__ int2 tile[kTile];
    for (int first = 0; first < count; first += kTile) {
        const int rows = min(kTile, count - first);
        __syncthreads();  // the previous tile is still being read
        for (int i = threadIdx.x; i < rows; i += kThreads) tile[i] = pairs[first + i];
        __syncthreads();
        const unsigned total = rows * row_vectors;
        for (unsigned begin = blockIdx.x * kThreads * kUnroll + threadIdx.x; begin < total; begin += gridDim.x * kThreads * kUnroll) {
            uint4 values[kUnroll];
            uint4* places[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const unsigned vector = begin + u * kThreads;
                if (vector >= total) break;
                const unsigned row = vector / row_vectors, offset = vector - row * row_vectors;
                values[u] = load_once(reinterpret_cast<const uint4*>(source + tile[row].x * source_stride) + offset);
                places[u] = reinterpret_cast<uint4*>(target + tile[row].y * target_stride) + offset;
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (begin + u * kThreads >= total) break;
                store_once(places[u], values[u]);
            }
        }
    }
}

}  // namespace

extern "C" int dix_page_copy(const void* source, void* target, const void* pairs, int count, int64_t source_stride, int64_t target_stride,
                             int64_t row_bytes, int num_blocks, void* stream) {
    if (count == 0) return cudaSuccess;
    const auto unaligned = reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target) | source_stride | target_stride | row_bytes;
    // The flat vector number of a tile has to fit 32 bits.
    if (count < 0 || num_blocks < 1 || row_bytes <= 0 || unaligned % 16 != 0 || row_bytes / 16 > UINT32_MAX / kTile / 2) return cudaErrorInvalidValue;
    page_copy<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const char*>(source), static_cast<char*>(target), static_cast<const int2*>(pairs), count, source_stride, target_stride,
        static_cast<unsigned>(row_bytes / 16));
    return cudaGetLastError();
}
