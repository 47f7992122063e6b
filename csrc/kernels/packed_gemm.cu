// y = W x for few columns x: weights stay packed (E2M1 with a scale per row and 32 columns, or E4M3 with a scale per 32x32 block) and
// become bf16 in registers, exactly. Time is the bytes of the weights.
//
// The packed order is the order of use: 16 rows times 256 (FP4) or 128 (FP8) columns are one block of 2,048 bytes, and the 16 bytes that
// a lane loads are its own operands of mma.m16n8k16, with weights as the 16-row operand and up to 8 tokens per tile as columns. So weights
// go from memory to registers without a shuffle. Each lane copies its own bytes through a ring in shared memory and waits for nobody.
// A column of an mma depends on that column of the tokens alone: columns without a token may hold anything.
//
// A unit of work is (item, tiles of rows): an item is up to 8 * kTiles tokens of one weight matrix ("group"). kSlices warps share a tile
// of rows, each takes every kSlices-th block of columns, and the first adds the partial sums in a fixed order.
//
// Epilogues: plain rows (bf16 or fp32), or clamped SwiGLU, for which rows g and g + 8 of a tile are gate and up of one channel.
#include "warp.cuh"

namespace dix {

enum Format { kFp4 = 0, kFp8 = 1 };
enum Epilogue { kPlainBf16 = 0, kPlainFp32 = 1, kSwiglu = 2 };

struct PackedGemm {
    const unsigned char* codes;   // [groups, tiles, blocks, 2048]
    const unsigned char* scales;  // [groups, tiles, blocks, 128 (FP4) or 8 (FP8)]: exponent fields of bf16 factors
    const uint16_t* x;            // bf16; row r of group q starts at r * x_stride + q * x_group_stride
    void* y;                      // row r of group q starts at r * y_stride + q * y_group_stride
    const int* items;             // [num_items, 4]: group, first entry of slots, number of tokens, unused; null: all rows, group by group
    const int* num_items;         // device scalar; null with items null
    const int* slots;             // rows of y of each item's tokens; their row of x is slot / x_divisor
    const float* weights;         // factor of each slot for kSwiglu, null for 1
    int64_t x_stride, x_group_stride, y_stride, y_group_stride;
    int tiles, blocks, rows, num_rows, num_groups, x_divisor;
    float limit;
};

constexpr int kWarps = 8;
// Depth of the ring and thread blocks of a multiprocessor: with one tile of tokens three blocks fit its registers and shared memory.
template <int kTiles>
constexpr int kStagesOf = kTiles == 1 ? 3 : 4;
template <int kTiles>
constexpr int kResidentsOf = kTiles == 1 ? 3 : kTiles <= 4 ? 2 : 1;
constexpr int kBlockBytes = 2048;
constexpr int kStageBytes = kBlockBytes + 32 * 8;  // every lane keeps the scales it needs

template <Format kFormat>
struct Layout;

template <>
struct Layout<kFp4> {
    static constexpr int kChunk = 64;     // columns of the 512 bytes that a warp reads at once
    static constexpr int kVectors = 2;    // 16-byte loads of a token per lane and chunk
    static constexpr int kScaleBytes = 128;
    static __device__ __forceinline__ int scale_offset(int g, int t) { return (g * 2 + (t >> 1)) * 8; }
    // Step `s` of a chunk: sign to bit 15, magnitude to bits 8..6 of each half, times 2^126 * scale. The four codes of a half share its 16
    // bits such that three of them need a rotation and a mask.
    static __device__ __forceinline__ void decode(const uint32_t (&w)[4], int s, uint32_t upper, uint32_t lower, uint32_t (&a)[4]) {
        const uint32_t word = w[s];
        a[0] = multiply_bf16x2(word & 0x81C081C0u, upper);
        a[1] = multiply_bf16x2((word << 6) & 0x81C081C0u, lower);
        a[2] = multiply_bf16x2(rotate_left(word, 10) & 0x81C081C0u, upper);
        a[3] = multiply_bf16x2(((word << 4) & 0x81808180u) | ((word >> 4) & 0x00400040u), lower);
    }
};

template <>
struct Layout<kFp8> {
    static constexpr int kChunk = 32;
    static constexpr int kVectors = 1;
    static constexpr int kScaleBytes = 8;
    static __device__ __forceinline__ int scale_offset(int, int) { return 0; }
    static __device__ __forceinline__ uint32_t spread(uint32_t word) { return (word & 0x80008000u) | ((word >> 4) & 0x07F007F0u); }
    // Sign to bit 15, magnitude to bits 10..4, times 2^120 * scale.
    static __device__ __forceinline__ void decode(const uint32_t (&w)[4], int s, uint32_t upper, uint32_t lower, uint32_t (&a)[4]) {
        a[0] = multiply_bf16x2(spread(w[2 * s]), upper);
        a[1] = multiply_bf16x2(spread(w[2 * s + 1]), lower);
        a[2] = multiply_bf16x2(spread(w[2 * s] << 8), upper);
        a[3] = multiply_bf16x2(spread(w[2 * s + 1] << 8), lower);
    }
};

// Byte `q` of `fields` as the exponent of a bf16, in both halves.
__device__ __forceinline__ uint32_t factor(uint32_t fields, int q) { return select_bytes(fields, 0, 0x4040u | q | (q << 8)) << 7; }

template <int kValue>
struct Number {
    static constexpr int value = kValue;
};

struct Item {
    int group, begin, count;
};

template <int kTiles>
__device__ __forceinline__ Item item_of(const PackedGemm& p, int item) {
    if (p.items != nullptr) return {p.items[4 * item], p.items[4 * item + 1], p.items[4 * item + 2]};
    const int begin = item / p.num_groups * 8 * kTiles, left = p.num_rows - begin;
    return {item % p.num_groups, begin, left < 8 * kTiles ? left : 8 * kTiles};
}

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
        const int group = p.items != nullptr ? p.items[4 * item] : item % p.num_groups;
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

template <Epilogue kEpilogue>
__device__ __forceinline__ void store(const PackedGemm& p, const Item& item, int tile, int column, int g, float upper, float lower) {
    if (column >= item.count) return;
    const int slot = p.items != nullptr ? p.slots[item.begin + column] : item.begin + column;
    const int64_t row = slot * p.y_stride + item.group * p.y_group_stride;
    if constexpr (kEpilogue == kSwiglu) {
        const int channel = tile * 8 + g;
        if (2 * channel >= p.rows) return;
        // Comparisons, not fminf: a NaN has to stay one.
        float gate = bf16_round(upper), up = bf16_round(lower);
        gate = gate > p.limit ? p.limit : gate;
        up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
        const float weight = p.weights != nullptr ? p.weights[slot] : 1.0f;
        static_cast<uint16_t*>(p.y)[row + channel] = bf16_bits(gate / (1.0f + expf(-gate)) * up * weight);
    } else {
        const int first = tile * 16 + g;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (first + 8 * half >= p.rows) continue;
            const float value = half ? lower : upper;
            if constexpr (kEpilogue == kPlainFp32) {
                static_cast<float*>(p.y)[row + first + 8 * half] = value;
            } else {
                static_cast<uint16_t*>(p.y)[row + first + 8 * half] = bf16_bits(value);
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
    const int num_items = p.items != nullptr ? *p.num_items : (p.num_rows + 8 * kTiles - 1) / (8 * kTiles) * p.num_groups;
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
        const Item item = item_of<kTiles>(p, item_index);
        const int tile = (unit - item_index * tile_groups) * (kWarps / kSlices) + row_warp;

        const uint16_t* token[kTiles];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            // Columns behind the last token repeat the first: their results are dropped, their loads hit the same lines.
            const int entry = item.begin + (j * 8 + g < item.count ? j * 8 + g : 0);
            const int row = p.items != nullptr ? p.slots[entry] / p.x_divisor : entry;
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
    static const cudaError_t ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
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
    if constexpr (kFormat == kFp4 || kEpilogue == kPlainBf16) {
        if (slices == 1) return choose_tiles<kFormat, kEpilogue, 1>(p, tiles, num_blocks, stream);
        if (slices == 4) return choose_tiles<kFormat, kEpilogue, 4>(p, tiles, num_blocks, stream);
    }
    if constexpr (kFormat == kFp8) {
        if (slices == 8) return choose_tiles<kFormat, kEpilogue, 8>(p, tiles, num_blocks, stream);
    }
    return cudaErrorInvalidValue;
}

}  // namespace dix

// tiles of eight tokens per item: 1, 2, 4 or (FP8) 8; warps that share a tile of rows ("slices"): 1 or 4 for FP4, 1, 4 or 8 for plain FP8,
// 8 for FP8 with SwiGLU. FP4 writes SwiGLU or fp32, FP8 SwiGLU or bf16. Rows of x are readable up to whole blocks, with finite values.
// num_blocks: thread blocks; more than fit at once is allowed. Returns a cudaError_t.
extern "C" int dix_packed_gemm(const dix::PackedGemm* p, int format, int epilogue, int tiles, int slices, int num_blocks, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (num_blocks < 1 || p->x_stride % 8 != 0 || p->x_group_stride % 8 != 0) return cudaErrorInvalidValue;
    if (format == kFp4 && epilogue == kSwiglu) return choose<kFp4, kSwiglu>(*p, tiles, slices, num_blocks, s);
    if (format == kFp4 && epilogue == kPlainFp32) return choose<kFp4, kPlainFp32>(*p, tiles, slices, num_blocks, s);
    if (format == kFp8 && epilogue == kSwiglu) return choose<kFp8, kSwiglu>(*p, tiles, slices, num_blocks, s);
    if (format == kFp8 && epilogue == kPlainBf16) return choose<kFp8, kPlainBf16>(*p, tiles, slices, num_blocks, s);
    return cudaErrorInvalidValue;
}
