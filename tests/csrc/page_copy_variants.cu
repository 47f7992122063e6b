// Ways to gather rows over the bus, side by side: what `python -m tests.csrc.bench_page_copy` compares. Not part of the product.
//
// Every variant copies row pairs[i].x of source to row pairs[i].y of target; pairs lie in device memory, so that only the copy is timed.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

enum Load { kNoAllocate, kPlain, kStreaming, kVolatile, kRelaxedSys, kPrefetch256, kNonCoherent };
enum Store { kStoreNoAllocate, kStorePlain, kStoreStreaming, kStoreThrough };

#define DIX_LOAD(qualifier)                                                                        \
    asm volatile("ld." qualifier ".v4.u32 {%0, %1, %2, %3}, [%4];"                                 \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                                      \
                 : "l"(address)                                                                    \
                 : "memory")
#define DIX_STORE(qualifier) \
    asm volatile("st." qualifier ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory")

template <int kKind>
__device__ __forceinline__ uint4 load(const uint4* address) {
    uint4 v;
    if constexpr (kKind == kNoAllocate) DIX_LOAD("global.L1::no_allocate");
    if constexpr (kKind == kPlain) DIX_LOAD("global");
    if constexpr (kKind == kStreaming) DIX_LOAD("global.cs");
    if constexpr (kKind == kVolatile) DIX_LOAD("volatile.global");
    if constexpr (kKind == kRelaxedSys) DIX_LOAD("relaxed.sys.global.L1::no_allocate");
    if constexpr (kKind == kPrefetch256) DIX_LOAD("global.L1::no_allocate.L2::256B");
    if constexpr (kKind == kNonCoherent) DIX_LOAD("global.nc.L1::no_allocate");
    return v;
}

template <int kKind>
__device__ __forceinline__ void store(uint4* address, uint4 v) {
    if constexpr (kKind == kStoreNoAllocate) DIX_STORE("global.L1::no_allocate");
    if constexpr (kKind == kStorePlain) DIX_STORE("global");
    if constexpr (kKind == kStoreStreaming) DIX_STORE("global.cs");
    if constexpr (kKind == kStoreThrough) DIX_STORE("global.wt");
}

struct Job {
    const char* source;
    char* target;
    const int2* pairs;
    int count;
    int64_t source_stride, target_stride;
    unsigned row_vectors;
};

// Flat range of vectors. kRun: consecutive 512-byte pieces that one warp reads; kRun == kUnroll streams runs of kUnroll * 512 B, 1 lets
// the block read one contiguous kThreads * 16 B stripe per step.
template <int kThreads, int kUnroll, bool kRuns, int kLoad, int kStore>
__global__ void __launch_bounds__(kThreads) flat(Job job) {
    const unsigned total = job.count * job.row_vectors;
    const unsigned step = kRuns ? 32 : kThreads;
    const unsigned lane = kRuns ? (threadIdx.x / 32) * 32 * kUnroll + threadIdx.x % 32 : threadIdx.x;
    for (unsigned begin = blockIdx.x * kThreads * kUnroll + lane; begin < total; begin += gridDim.x * kThreads * kUnroll) {
        uint4 values[kUnroll];
        uint4* places[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const unsigned vector = begin + u * step;
            if (vector >= total) break;
            const unsigned row = vector / job.row_vectors, offset = vector - row * job.row_vectors;
            const int2 pair = __ldg(job.pairs + row);
            values[u] = load<kLoad>(reinterpret_cast<const uint4*>(job.source + pair.x * job.source_stride) + offset);
            places[u] = reinterpret_cast<uint4*>(job.target + pair.y * job.target_stride) + offset;
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (begin + u * step >= total) break;
            store<kStore>(places[u], values[u]);
        }
    }
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void wait(unsigned barrier, unsigned phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra end;\nbra again;\nend:\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// The bulk copy engine of each multiprocessor moves pieces through a ring of shared memory; one thread per block issues.
template <int kPiece, int kStages>
__global__ void __launch_bounds__(32) bulk(Job job) {
    extern __shared__ __align__(128) char ring[];
    __shared__ __align__(8) uint64_t full[kStages];
    if (threadIdx.x != 0) return;
    for (int s = 0; s < kStages; ++s) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + s)));
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    const unsigned row_bytes = job.row_vectors * 16, per_row = (row_bytes + kPiece - 1) / kPiece;
    const unsigned total = job.count * per_row;
    const unsigned mine = total > blockIdx.x ? (total - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    constexpr unsigned kPending = kStages / 2;  // stores that may still read shared memory when the next load is issued

    auto fetch = [&](unsigned i) {
        const unsigned piece = blockIdx.x + i * gridDim.x, row = piece / per_row, offset = (piece - row * per_row) * kPiece;
        const unsigned bytes = min(static_cast<unsigned>(kPiece), row_bytes - offset), stage = i % kStages;
        const char* from = job.source + __ldg(&job.pairs[row].x) * job.source_stride + offset;
        const unsigned barrier = shared_address(full + stage);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(ring + stage * kPiece)),
                     "l"(from), "r"(bytes), "r"(barrier)
                     : "memory");
    };
    for (unsigned i = 0; i < mine && i < kStages; ++i) fetch(i);
    for (unsigned i = 0; i < mine; ++i) {
        const unsigned stage = i % kStages;
        wait(shared_address(full + stage), (i / kStages) & 1);
        const unsigned piece = blockIdx.x + i * gridDim.x, row = piece / per_row, offset = (piece - row * per_row) * kPiece;
        const unsigned bytes = min(static_cast<unsigned>(kPiece), row_bytes - offset);
        char* to = job.target + __ldg(&job.pairs[row].y) * job.target_stride + offset;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
                     "r"(shared_address(ring + stage * kPiece)), "r"(bytes)
                     : "memory");
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
        if (i >= kPending && i - kPending + kStages < mine) fetch(i - kPending + kStages);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <int kThreads, int kUnroll, bool kRuns, int kLoad, int kStore>
int launch_flat(const Job& job, int blocks, cudaStream_t stream) {
    flat<kThreads, kUnroll, kRuns, kLoad, kStore><<<blocks, kThreads, 0, stream>>>(job);
    return cudaGetLastError();
}

template <int kPiece, int kStages>
int launch_bulk(const Job& job, int blocks, cudaStream_t stream) {
    constexpr int kBytes = kPiece * kStages;
    static_assert(kBytes <= 225 * 1024);
    const auto status = cudaFuncSetAttribute(bulk<kPiece, kStages>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (status != cudaSuccess) return status;
    bulk<kPiece, kStages><<<blocks, 32, kBytes, stream>>>(job);
    return cudaGetLastError();
}

struct Variant {
    const char* name;
    int (*launch)(const Job&, int, cudaStream_t);
};

const Variant kVariants[] = {
    {"flat 1024 u4", launch_flat<1024, 4, false, kNoAllocate, kStoreNoAllocate>},
    {"flat 1024 u2", launch_flat<1024, 2, false, kNoAllocate, kStoreNoAllocate>},
    {"flat 512 u4", launch_flat<512, 4, false, kNoAllocate, kStoreNoAllocate>},
    {"flat 512 u8", launch_flat<512, 8, false, kNoAllocate, kStoreNoAllocate>},
    {"flat 1024 u1", launch_flat<1024, 1, false, kNoAllocate, kStoreNoAllocate>},
    {"runs 1024 u4", launch_flat<1024, 4, true, kNoAllocate, kStoreNoAllocate>},
    {"runs 512 u8", launch_flat<512, 8, true, kNoAllocate, kStoreNoAllocate>},
    {"runs 1024 u2", launch_flat<1024, 2, true, kNoAllocate, kStoreNoAllocate>},
    {"runs 256 u8", launch_flat<256, 8, true, kNoAllocate, kStoreNoAllocate>},
    {"flat 1024 u4 ld plain", launch_flat<1024, 4, false, kPlain, kStoreNoAllocate>},
    {"flat 1024 u4 ld.cs", launch_flat<1024, 4, false, kStreaming, kStoreNoAllocate>},
    {"flat 1024 u4 ld.volatile", launch_flat<1024, 4, false, kVolatile, kStoreNoAllocate>},
    {"flat 1024 u4 ld.relaxed.sys", launch_flat<1024, 4, false, kRelaxedSys, kStoreNoAllocate>},
    {"flat 1024 u4 ld 256B", launch_flat<1024, 4, false, kPrefetch256, kStoreNoAllocate>},
    {"flat 1024 u4 ld.nc", launch_flat<1024, 4, false, kNonCoherent, kStoreNoAllocate>},
    {"flat 1024 u4 st plain", launch_flat<1024, 4, false, kNoAllocate, kStorePlain>},
    {"flat 1024 u4 st.cs", launch_flat<1024, 4, false, kNoAllocate, kStoreStreaming>},
    {"flat 1024 u4 st.wt", launch_flat<1024, 4, false, kNoAllocate, kStoreThrough>},
    {"bulk 2K x32", launch_bulk<2048, 32>},
    {"bulk 4K x16", launch_bulk<4096, 16>},
    {"bulk 4K x32", launch_bulk<4096, 32>},
    {"bulk 8K x8", launch_bulk<8192, 8>},
    {"bulk 8K x24", launch_bulk<8192, 24>},
    {"bulk 16K x4", launch_bulk<16384, 4>},
    {"bulk 16K x12", launch_bulk<16384, 12>},
    {"bulk 32K x6", launch_bulk<32768, 6>},
};

}  // namespace

extern "C" int dix_variant_count() { return sizeof(kVariants) / sizeof(kVariants[0]); }

extern "C" const char* dix_variant_name(int variant) { return kVariants[variant].name; }

extern "C" int dix_variant_launch(int variant, const void* source, void* target, const void* pairs, int count, int64_t source_stride,
                                  int64_t target_stride, int64_t row_bytes, int num_blocks, void* stream) {
    const Job job{static_cast<const char*>(source),   static_cast<char*>(target), static_cast<const int2*>(pairs), count, source_stride, target_stride,
                  static_cast<unsigned>(row_bytes / 16)};
    return kVariants[variant].launch(job, num_blocks, static_cast<cudaStream_t>(stream));
}
