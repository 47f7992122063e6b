// y = W x for few columns x: weights stay packed (E2M1 with a scale per row and 32 columns, or E4M3 with a scale per 32x32 block) and
// become bf16 in registers, exactly. Time is the bytes of the weights.
//
// Each lane copies its own bytes of weights (packed_weights.cuh) through a ring in shared memory and waits for nobody.
//
// A unit of work is (item, tiles of rows): an item is up to 8 * kTiles tokens of one weight matrix ("group"). kSlices warps share a tile
// of rows, each takes every kSlices-th block of columns, and the first adds the partial sums in a fixed order.
//
// Epilogues: plain rows (bf16 or fp32), or clamped SwiGLU, for which rows g and g + 8 of a tile are gate and up of one channel.
#include "packed_weights.cuh"

namespace dix {

constexpr int kWarps = 8;
// Depth of the ring and thread blocks of a multiprocessor: with one tile of tokens three blocks fit its registers and shared memory.
template <int kTiles>
constexpr int kStagesOf = kTiles == 1 ? 3 : 4;
template <int kTiles>
constexpr int kResidentsOf = kTiles == 1 ? 3 : kTiles <= 4 ? 2 : 1;
constexpr int kStageBytes = kBlockBytes + 32 * 8;  // every lane keeps the scales it needs

template <int kValue>
struct Number {
    static constexpr int value = kValue;
};

template <Format kFormat, int kTiles, int kSlices>
struct Loader {
    // The stream of blocks of one warp, over all its units, in the order of use.
    const PackedGemm& p;
    int unit, units, tile_groups, row_warp, slice, block, lane_codes, lane_scales;
    const unsigned char* codes;
    const unsigned char* scales;

    __device__ __forceinline__ void open() {
        if (unit >= units) return;
        const int item = unit / tile_groups;
        const int tile = (unit - item * tile_groups) * (kWarps / kSlices) + row_warp;
        const int group = item_of(p, item, 8 * kTiles).group;
        // Warps behind the last tile repeat it and store nothing.
        const int64_t first = (static_cast<int64_t>(group) * p.tiles + (tile < p.tiles ? tile : p.tiles - 1)) * p.blocks;
        codes = p.codes + first * kBlockBytes + lane_codes;
        scales = p.scales + first * Layout<kFormat>::kScaleBytes + lane_scales;
    }

    __device__ __forceinline__ void skip_finished() {
        while (unit < units && block >= p.blocks) {
            unit += gridDim.x;
            block = slice;
            open();
        }
    }

    __device__ __forceinline__ void issue(unsigned char* stage, int lane) {
        if (unit < units) {
            const unsigned char* from = codes + static_cast<int64_t>(block) * kBlockBytes;
#pragma unroll
            for (int q = 0; q < 4; ++q) copy_async16(stage + q * 512 + lane * 16, from + q * 512);
            copy_async8(stage + kBlockBytes + lane * 8, scales + block * Layout<kFormat>::kScaleBytes);
            block += kSlices;
            skip_finished();
        }
        commit_copies();  // an empty group keeps the count of pending groups
    }
};

// The products of one unit: this warp's blocks of columns times kUsed tiles of tokens. `token`: this lane's first values of each tile's
// column g. No branch inside the loop over blocks, so that decoding, loads and products of different steps overlap.
template <Format kFormat, int kTiles, int kSlices, int kUsed>
__device__ __forceinline__ void accumulate(Loader<kFormat, kTiles, kSlices>& loader, unsigned char* ring, int& head, int lane,
                                           const uint16_t* (&token)[kTiles], int blocks, int slice, float (&acc)[kTiles][4]) {
    using L = Layout<kFormat>;
    constexpr int kSteps = L::kChunk / 16, kStages = kStagesOf<kTiles>;
    uint4 next[kUsed][L::kVectors];
    const auto load_tokens = [&](int offset) {
#pragma unroll
        for (int j = 0; j < kUsed; ++j) {
#pragma unroll
            for (int v = 0; v < L::kVectors; ++v) next[j][v] = load_global16(token[j] + offset + 8 * v);
        }
    };
    if (slice < blocks) load_tokens(0);
#pragma unroll 1
    for (int block = slice; block < blocks; block += kSlices) {
        wait_copies<kStages - 2>();
        const unsigned char* stage = ring + head * kStageBytes;
        head = (head + 1) % kStages;
        // Refills the stage of the previous block, whose values this lane has used.
        loader.issue(ring + (head + kStages - 2) % kStages * kStageBytes, lane);
        const uint2 fields = load_shared8(stage + kBlockBytes + lane * 8);
        // Behind the last block the first chunk of this one is loaded once more, and not used.
        const int step = block + kSlices < blocks ? kSlices * 4 * L::kChunk : 0;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const uint4 packed = load_shared16(stage + q * 512 + lane * 16);
            const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
            uint4 now[kUsed][L::kVectors];
#pragma unroll
            for (int j = 0; j < kUsed; ++j) {
#pragma unroll
                for (int v = 0; v < L::kVectors; ++v) now[j][v] = next[j][v];
            }
            if (q == 3) {
#pragma unroll
                for (int j = 0; j < kUsed; ++j) token[j] += step;
            }
            load_tokens(q < 3 ? (q + 1) * L::kChunk : 0);
            const uint32_t upper = factor(fields.x, q), lower = factor(fields.y, q);
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                uint32_t a[4];
                L::decode(words, s, upper, lower, a);
#pragma unroll
                for (int j = 0; j < kUsed; ++j) {
                    const uint4 values = now[j][s / 2];
                    mma_bf16(acc[j], a, s % 2 ? values.z : values.x, s % 2 ? values.w : values.y);
                }
            }
        }
    }
}

template <Format kFormat, Epilogue kEpilogue, int kTiles, int kSlices>
__global__ void __launch_bounds__(kWarps * 32, kResidentsOf<kTiles>) packed_gemm(const PackedGemm p) {
    using L = Layout<kFormat>;
    constexpr int kStages = kStagesOf<kTiles>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int slice = warp % kSlices, row_warp = warp / kSlices;
    const int num_items = num_items_of(p, 8 * kTiles);
    const int tile_groups = (p.tiles + kWarps / kSlices - 1) / (kWarps / kSlices);
    const int units = num_items * tile_groups;
    unsigned char* ring = shared_memory() + warp * kStages * kStageBytes;
    float* sums = reinterpret_cast<float*>(shared_memory() + kWarps * kStages * kStageBytes);

    Loader<kFormat, kTiles, kSlices> loader{p,     static_cast<int>(blockIdx.x), units, tile_groups, row_warp, slice, slice, lane * 16,
                                            L::scale_offset(g, t), nullptr, nullptr};
    loader.open();
    loader.skip_finished();
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) loader.issue(ring + s * kStageBytes, lane);
    int head = 0;  // stage of the block to be used next

    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int item_index = unit / tile_groups;
        const Item item = item_of(p, item_index, 8 * kTiles);
        const int tile = (unit - item_index * tile_groups) * (kWarps / kSlices) + row_warp;

        const uint16_t* token[kTiles];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            // Columns behind the last token repeat the first: their results are dropped, their loads hit the same lines.
            const int entry = item.begin + (j * 8 + g < item.count ? j * 8 + g : 0);
            const int row = slot_of(p, entry) / p.x_divisor;
            token[j] = p.x + row * p.x_stride + item.group * p.x_group_stride + slice * 4 * L::kChunk + t * 8 * L::kVectors;
        }
        float acc[kTiles][4] = {};
        const auto run = [&](auto used) {
            accumulate<kFormat, kTiles, kSlices, used.value>(loader, ring, head, lane, token, p.blocks, slice, acc);
        };
        if (kTiles == 1 || item.count <= 8) {
            run(Number<1>{});
        } else if (kTiles == 2 || item.count <= 16) {
            run(Number<kTiles < 2 ? kTiles : 2>{});
        } else if (kTiles == 4 || item.count <= 32) {
            run(Number<kTiles < 4 ? kTiles : 4>{});
        } else {
            run(Number<kTiles>{});
        }
        if constexpr (kSlices > 1) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[((warp * kTiles + j) * 4 + i) * 32 + lane] = acc[j][i];
            }
            sync_block();
            if (slice == 0) {
                for (int other = 1; other < kSlices; ++other) {
#pragma unroll
                    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) acc[j][i] += sums[(((warp + other) * kTiles + j) * 4 + i) * 32 + lane];
                    }
                }
            }
            sync_block();  // the next unit writes the sums again
        }
        if (slice == 0 && tile < p.tiles) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
                store<kEpilogue>(p, item, tile, j * 8 + 2 * t, g, acc[j][0], acc[j][2]);
                store<kEpilogue>(p, item, tile, j * 8 + 2 * t + 1, g, acc[j][1], acc[j][3]);
            }
        }
    }
    wait_copies<0>();
}

template <Format kFormat, Epilogue kEpilogue, int kTiles, int kSlices>
int launch(const PackedGemm& p, int num_blocks, cudaStream_t stream) {
    constexpr int kShared = kWarps * (kStagesOf<kTiles> * kStageBytes + (kSlices > 1 ? kTiles * 512 : 0));
    const auto kernel = packed_gemm<kFormat, kEpilogue, kTiles, kSlices>;
    // Every time: the attribute belongs to the device that is current, and a process may use several.
    const cudaError_t ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (ready != cudaSuccess) return ready;
    DIX_LAUNCH(kernel, num_blocks, kWarps * 32, kShared, stream, p);
    return cudaGetLastError();
}

template <Format kFormat, Epilogue kEpilogue, int kSlices>
int choose_tiles(const PackedGemm& p, int tiles, int num_blocks, cudaStream_t stream) {
    if (tiles == 1) return launch<kFormat, kEpilogue, 1, kSlices>(p, num_blocks, stream);
    if (tiles == 2) return launch<kFormat, kEpilogue, 2, kSlices>(p, num_blocks, stream);
    if (tiles == 4) return launch<kFormat, kEpilogue, 4, kSlices>(p, num_blocks, stream);
    if constexpr (kFormat == kFp8) {
        if (tiles == 8) return launch<kFormat, kEpilogue, 8, kSlices>(p, num_blocks, stream);
    }
    return cudaErrorInvalidValue;
}

template <Format kFormat, Epilogue kEpilogue>
int choose(const PackedGemm& p, int tiles, int slices, int num_blocks, cudaStream_t stream) {
    if (slices == 1) return choose_tiles<kFormat, kEpilogue, 1>(p, tiles, num_blocks, stream);
    if constexpr (kFormat == kFp8 && kEpilogue == kPlainBf16) {
        if (slices == 4) return choose_tiles<kFormat, kEpilogue, 4>(p, tiles, num_blocks, stream);
    }
    if constexpr (kFormat == kFp8) {
        if (slices == 8) return choose_tiles<kFormat, kEpilogue, 8>(p, tiles, num_blocks, stream);
    }
    return cudaErrorInvalidValue;
}

}  // namespace dix

// tiles of eight tokens per item: 1, 2, 4 or (FP8) 8; warps that share a tile of rows ("slices"): 1, for plain FP8 4, for FP8 8. One slice
// adds in the order of packed_tiles.cu, to the bit. FP4 writes SwiGLU, fp32 or bf16, FP8 SwiGLU or bf16. Rows of x are readable up to whole blocks, with finite values.
// num_blocks: thread blocks; more than fit at once is allowed. Returns a cudaError_t.
extern "C" int dix_packed_gemm(const dix::PackedGemm* p, int format, int epilogue, int tiles, int slices, int num_blocks, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (num_blocks < 1 || p->x_stride % 8 != 0 || p->x_group_stride % 8 != 0) return cudaErrorInvalidValue;
    if (format == kFp4 && epilogue == kSwiglu) return choose<kFp4, kSwiglu>(*p, tiles, slices, num_blocks, s);
    if (format == kFp4 && epilogue == kPlainFp32) return choose<kFp4, kPlainFp32>(*p, tiles, slices, num_blocks, s);
    if (format == kFp4 && epilogue == kPlainBf16) return choose<kFp4, kPlainBf16>(*p, tiles, slices, num_blocks, s);
    if (format == kFp8 && epilogue == kSwiglu) return choose<kFp8, kSwiglu>(*p, tiles, slices, num_blocks, s);
    if (format == kFp8 && epilogue == kPlainBf16) return choose<kFp8, kPlainBf16>(*p, tiles, slices, num_blocks, s);
    return cudaErrorInvalidValue;
}
