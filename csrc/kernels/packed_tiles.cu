// y = W x for many columns x: the packed weights of packed_gemm.cu times tiles of up to 128 tokens. Time is the tensor cores' and the
// decoding; weights are read once per tile of tokens.
//
// A unit of work is (item of up to 128 tokens, 256 rows): eight warps of 32 rows each share the tokens, which travel through a ring of
// stages of 64 columns in shared memory; each lane copies its own weights beside them. A warp decodes 32 x 64 weights once per stage and
// multiplies them with as many pairs of token tiles as the item fills, so that a half-filled item costs half.
#include "packed_weights.cuh"

namespace dix {

constexpr int kTileWarps = 8;
constexpr int kTileThreads = kTileWarps * 32;
constexpr int kTileTokens = 128;
constexpr int kRowTiles = 2;  // tiles of 16 rows per warp
constexpr int kStageColumns = 64;
constexpr int kTileStages = 4;
constexpr int kTokenBytes = kTileTokens * kStageColumns * 2;

template <Format kFormat>
struct Stage {
    static constexpr int kChunks = kStageColumns / Layout<kFormat>::kChunk;  // of weights per row tile
    static constexpr int kWarpBytes = kRowTiles * kChunks * 512;
    static constexpr int kBytes = kTokenBytes + kTileWarps * kWarpBytes;
    static constexpr int kPerBlock = 4 / kChunks;  // stages of one block of weights
    // Two neighbouring tokens are read together: pieces of every second one change places, so that they lie in different banks.
    static constexpr int kSwap = kFormat == kFp4 ? 1 : 4;
    // The 16-byte piece of a token that holds lane t's values for steps 2 * v and 2 * v + 1.
    static __device__ __forceinline__ int piece(int t, int v) { return kFormat == kFp4 ? 2 * t + v : 4 * v + t; }
};

template <Format kFormat>
struct TileCopies {
    // What one thread copies per stage: one piece of four tokens, and its own weights.
    const uint16_t* token[4];
    const unsigned char* codes[kRowTiles];
    bool used[4];

    __device__ __forceinline__ void issue(unsigned char* stage, int column_stage) const {
        using S = Stage<kFormat>;
        const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = thread / 8 + 32 * i, piece = thread % 8;
            const int place = piece ^ (row % 2 * S::kSwap);
            if (used[i]) copy_async16(stage + row * 128 + place * 16, token[i] + column_stage * kStageColumns + piece * 8);
        }
        unsigned char* mine = stage + kTokenBytes + warp * S::kWarpBytes + lane * 16;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int c = 0; c < S::kChunks; ++c) {
                copy_async16(mine + (r * S::kChunks + c) * 512, codes[r] + (static_cast<int64_t>(column_stage) * S::kChunks + c) * 512);
            }
        }
    }
};

// What a warp holds of a unit: its rows' first scales, its sums, and where in the ring its tokens are.
template <Format kFormat>
struct TileSums {
    const unsigned char* scales[kRowTiles];
    float acc[kRowTiles][kTileTokens / 8][4];
};

// All stages of one unit for items of up to 16 * kPairs tokens. Without a branch between products, so that tokens are read ahead of them.
template <Format kFormat, int kPairs>
__device__ __forceinline__ void multiply(const PackedGemm& p, const TileCopies<kFormat>& copies, TileSums<kFormat>& sums, int num_stages) {
    using L = Layout<kFormat>;
    using S = Stage<kFormat>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    uint2 fields[kRowTiles], later[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) later[r] = load_global8(sums.scales[r]);
#pragma unroll 1
    for (int stage = 0; stage < num_stages; ++stage) {
        wait_copies<kTileStages - 2>();
        sync_block();  // everyone's tokens of this stage are there, and the stage before has been read
        const int ahead = stage + kTileStages - 1;
        if (ahead < num_stages) copies.issue(shared_memory() + ahead % kTileStages * S::kBytes, ahead);
        commit_copies();
        if (stage % S::kPerBlock == 0) {
            const int block = stage / S::kPerBlock + 1 < p.blocks ? stage / S::kPerBlock + 1 : 0;
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                fields[r] = later[r];
                later[r] = load_global8(sums.scales[r] + block * L::kScaleBytes);
            }
        }
        const unsigned char* now = shared_memory() + stage % kTileStages * S::kBytes;
        uint32_t a[kRowTiles][4][4];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int c = 0; c < S::kChunks; ++c) {
                const int q = stage % S::kPerBlock * S::kChunks + c;
                const uint32_t upper = factor(fields[r].x, q), lower = factor(fields[r].y, q);
                const uint4 packed = load_shared16(now + kTokenBytes + warp * S::kWarpBytes + (r * S::kChunks + c) * 512 + lane * 16);
                const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                for (int s = 0; s < 4 / S::kChunks; ++s) L::decode(words, s, upper, lower, a[r][c * (4 / S::kChunks) + s]);
            }
        }
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            uint4 values[2][2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int token = pair * 16 + j * 8 + g;
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    values[j][v] = load_shared16(now + token * 128 + (S::piece(t, v) ^ (g % 2 * S::kSwap)) * 16);
                }
            }
#pragma unroll
            for (int s = 0; s < 4; ++s) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint4 both = values[j][s / 2];
#pragma unroll
                    for (int r = 0; r < kRowTiles; ++r) {
                        mma_bf16(sums.acc[r][pair * 2 + j], a[r][s], s % 2 ? both.z : both.x, s % 2 ? both.w : both.y);
                    }
                }
            }
        }
    }
}

template <Format kFormat, Epilogue kEpilogue>
__global__ void __launch_bounds__(kTileThreads, 1) packed_tiles(const PackedGemm p) {
    using L = Layout<kFormat>;
    using S = Stage<kFormat>;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int row_groups = (p.tiles + kTileWarps * kRowTiles - 1) / (kTileWarps * kRowTiles);
    const int units = num_items_of(p, kTileTokens) * row_groups;
    const int num_stages = p.blocks * S::kPerBlock;

    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int item_index = unit / row_groups;
        const Item item = item_of(p, item_index, kTileTokens);
        const int first_tile = ((unit - item_index * row_groups) * kTileWarps + warp) * kRowTiles;
        TileCopies<kFormat> copies;
        TileSums<kFormat> sums = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = thread / 8 + 32 * i;
            copies.used[i] = column < item.count;
            const int entry = item.begin + (copies.used[i] ? column : 0);
            const int row = slot_of(p, entry) / p.x_divisor;
            copies.token[i] = p.x + row * p.x_stride + item.group * p.x_group_stride;
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            // Warps behind the last tile repeat it and store nothing.
            const int tile = first_tile + r < p.tiles ? first_tile + r : p.tiles - 1;
            const int64_t block = (static_cast<int64_t>(item.group) * p.tiles + tile) * p.blocks;
            copies.codes[r] = p.codes + block * kBlockBytes + lane * 16;
            sums.scales[r] = p.scales + block * L::kScaleBytes + L::scale_offset(g, t);
        }
        sync_block();  // the stages of the previous unit are still being read
#pragma unroll 1
        for (int s = 0; s < kTileStages - 1; ++s) {
            if (s < num_stages) copies.issue(shared_memory() + s * S::kBytes, s);
            commit_copies();
        }
        // Tokens behind the item's last one are whatever the stage holds: their columns are not stored.
        if (item.count <= 32) {
            multiply<kFormat, 2>(p, copies, sums, num_stages);
        } else if (item.count <= 64) {
            multiply<kFormat, 4>(p, copies, sums, num_stages);
        } else if (item.count <= 80) {
            multiply<kFormat, 5>(p, copies, sums, num_stages);
        } else {
            multiply<kFormat, 8>(p, copies, sums, num_stages);
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            if (first_tile + r >= p.tiles) continue;
#pragma unroll
            for (int j = 0; j < kTileTokens / 8; ++j) {
                if (j * 8 >= item.count) break;
                store<kEpilogue>(p, item, first_tile + r, j * 8 + 2 * t, g, sums.acc[r][j][0], sums.acc[r][j][2]);
                store<kEpilogue>(p, item, first_tile + r, j * 8 + 2 * t + 1, g, sums.acc[r][j][1], sums.acc[r][j][3]);
            }
        }
    }
    wait_copies<0>();
}

template <Format kFormat, Epilogue kEpilogue>
int launch_tiles(const PackedGemm& p, int num_blocks, cudaStream_t stream) {
    constexpr int kShared = kTileStages * Stage<kFormat>::kBytes;
    const auto kernel = packed_tiles<kFormat, kEpilogue>;
    const cudaError_t ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (ready != cudaSuccess) return ready;
    DIX_LAUNCH(kernel, num_blocks, kTileThreads, kShared, stream, p);
    return cudaGetLastError();
}

}  // namespace dix

// Items of up to 128 tokens. FP4 and FP8, SwiGLU or bf16. Rows of x are readable up to whole blocks, with finite values.
// num_blocks: thread blocks; one fits a multiprocessor. Returns a cudaError_t.
extern "C" int dix_packed_tiles(const dix::PackedGemm* p, int format, int epilogue, int num_blocks, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (num_blocks < 1 || p->x_stride % 8 != 0 || p->x_group_stride % 8 != 0) return cudaErrorInvalidValue;
    if (format == kFp4 && epilogue == kSwiglu) return launch_tiles<kFp4, kSwiglu>(*p, num_blocks, s);
    if (format == kFp4 && epilogue == kPlainBf16) return launch_tiles<kFp4, kPlainBf16>(*p, num_blocks, s);
    if (format == kFp8 && epilogue == kSwiglu) return launch_tiles<kFp8, kSwiglu>(*p, num_blocks, s);
    if (format == kFp8 && epilogue == kPlainBf16) return launch_tiles<kFp8, kPlainBf16>(*p, num_blocks, s);
    return cudaErrorInvalidValue;
}
