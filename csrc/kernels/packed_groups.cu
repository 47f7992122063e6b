// y = W x for many columns x by warpgroups of SM90: the work of packed_tiles.cu, whose units, rings and epilogues these are, at the rate of
// wgmma instead of mma.sync, which is half of it.
//
// Weights come from registers: a warp decodes its rows of the next stage while the tensor cores multiply those of this one. Tokens come from
// shared memory, where the tensor cores read them once per 64 rows; they want the columns of a token in the order of products, so x is given
// in that order (`in_order_of_products` of engine/ops/cuda/packed_gemm.py).
//
// With slices the columns are added in the order of as many warps of packed_gemm.cu that share a tile of rows: every slices-th block of them
// from zero, and each such sum to the ones before, which wait in shared memory. So batch-invariant mode may divide the columns for few tokens.
#include "packed_weights.cuh"
#include "warpgroup.cuh"

namespace dix {

constexpr int kGroupColumns = 64;
constexpr int kGroupAlign = 1024;  // of a tile of tokens

// Thread blocks of kWarps warps with kRows tiles of 16 rows each; kStages places of the ring.
template <int kManyWarps, int kManyRows, int kPlaces>
struct GroupForm {
    static constexpr int kTokens = 128, kWarps = kManyWarps, kRows = kManyRows, kStages = kPlaces;
    static constexpr int kThreads = 32 * kWarps;
};

template <Format kFormat, class Form>
struct GroupStage {
    static constexpr int kTokens = Form::kTokens, kGroupRows = Form::kRows;
    static constexpr int kTokenBytes = kTokens * kGroupColumns * 2;
    static constexpr int kChunks = kGroupColumns / Layout<kFormat>::kChunk;  // of weights per row tile
    static constexpr int kSteps = 4 / kChunks;                               // products of a chunk
    static constexpr int kWarpBytes = kGroupRows * kChunks * 512;
    static constexpr int kBytes = kTokenBytes + Form::kWarps * kWarpBytes;
    static constexpr int kPerBlock = 4 / kChunks;  // stages of one block of weights
};

// A block of columns in the order of slices: 0, slices, 2 * slices, .., then 1, slices + 1, ... slices: a power of two.
struct SlicedBlock {
    int number, slices, blocks;

    __device__ __forceinline__ int slice() const { return number & (slices - 1); }
    __device__ __forceinline__ bool ends_slice() const { return number + slices >= blocks; }
    __device__ __forceinline__ void advance() { number = ends_slice() ? slice() + 1 : number + slices; }
};

template <Format kFormat, class Form, bool kSliced>
struct GroupUnit {
    using L = Layout<kFormat>;
    using S = GroupStage<kFormat, Form>;
    static constexpr int kTokens = Form::kTokens, kGroupRows = Form::kRows, kStages = Form::kStages, kThreads = Form::kThreads;
    static constexpr int kUnderWay = kStages - 1;
    static constexpr int kCopied = kTokens * 8 / kThreads;  // tokens of which a thread copies a piece
    // Operands of the products of one stage.
    using GroupWeights = uint32_t[kGroupRows][4][4];

    const PackedGemm& p;
    unsigned char* ring;
    float4* sums;  // this thread's, of the slices before: one every kThreads
    int num_stages;
    SlicedBlock copied, fetched;  // whose weights are copied next, and whose scales are in `later`
    // What one thread copies per stage: one piece of some tokens, and its own weights.
    const uint16_t* token[kCopied];
    const unsigned char* codes[kGroupRows];
    bool used[kCopied];
    const unsigned char* scales[kGroupRows];
    uint2 fields[kGroupRows], later[kGroupRows];
    float acc[kGroupRows][kTokens / 8][4];

    __device__ __forceinline__ unsigned char* stage_at(int stage) const { return ring + stage % kStages * S::kBytes; }

    __device__ __forceinline__ void issue(int stage) {
        const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
        if (stage < num_stages) {
            int columns = stage;
            if constexpr (kSliced) {
                columns = copied.number * S::kPerBlock + stage % S::kPerBlock;
                if (stage % S::kPerBlock == S::kPerBlock - 1) copied.advance();
            }
            unsigned char* to = stage_at(stage);
#pragma unroll
            for (int i = 0; i < kCopied; ++i) {
                const int row = thread / 8 + kThreads / 8 * i, piece = thread % 8;
                if (used[i]) copy_async16(to + row * 128 + (piece ^ row % 8) * 16, token[i] + columns * kGroupColumns + piece * 8);
            }
            unsigned char* mine = to + S::kTokenBytes + warp * S::kWarpBytes + lane * 16;
#pragma unroll
            for (int r = 0; r < kGroupRows; ++r) {
#pragma unroll
                for (int c = 0; c < S::kChunks; ++c) {
                    copy_async16(mine + (r * S::kChunks + c) * 512, codes[r] + (static_cast<int64_t>(columns) * S::kChunks + c) * 512);
                }
            }
        }
        commit_copies();  // an empty group keeps the count of pending groups
    }

    // Only this lane's own copies are read.
    __device__ __forceinline__ void decode(int stage, GroupWeights& a) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (stage % S::kPerBlock == 0) {
            int block = stage / S::kPerBlock + 1;
            if constexpr (kSliced) {
                fetched.advance();
                block = fetched.number;
            }
            block = block < p.blocks ? block : 0;  // behind the last one nothing is used
#pragma unroll
            for (int r = 0; r < kGroupRows; ++r) {
                fields[r] = later[r];
                later[r] = load_global8(scales[r] + block * L::kScaleBytes);
            }
        }
        const unsigned char* mine = stage_at(stage) + S::kTokenBytes + warp * S::kWarpBytes + lane * 16;
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) {
#pragma unroll
            for (int c = 0; c < S::kChunks; ++c) {
                const int q = stage % S::kPerBlock * S::kChunks + c;
                const uint32_t upper = factor(fields[r].x, q), lower = factor(fields[r].y, q);
                const uint4 packed = load_shared16(mine + (r * S::kChunks + c) * 512);
                const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                for (int s = 0; s < S::kSteps; ++s) L::decode(words, s, upper, lower, a[r][c * S::kSteps + s]);
            }
        }
    }

    // The products of one stage, whose weights are decoded, while those of the next one are.
    template <int kPairs>
    __device__ __forceinline__ void step(int stage, const GroupWeights& now, GroupWeights& next) {
        show_shared();
        sync_block();  // everyone's tokens of this stage are there; everyone's products of the stage before are over
        const unsigned char* tokens = stage_at(stage);
        group_begin();
#pragma unroll
        for (int s = 0; s < 4; ++s) {
#pragma unroll
            for (int r = 0; r < kGroupRows; ++r) group_multiply<kPairs>(acc[r], now[r][s], tokens, s);
        }
        group_commit();
        issue(stage + kUnderWay);
        wait_copies<kUnderWay - 1>();
        if (stage + 1 < num_stages) decode(stage + 1, next);
        group_wait<0>();
    }

    // All stages for items of up to 16 * kPairs tokens.
    template <int kPairs>
    __device__ __forceinline__ void multiply() {
        GroupWeights even, odd;
        wait_copies<kUnderWay - 1>();
        decode(0, even);
        SlicedBlock now = copied;
        now.number = 0;
#pragma unroll 1
        for (int stage = 0; stage < num_stages; stage += 2) {
            step<kPairs>(stage, even, odd);
            if (stage + 1 < num_stages) step<kPairs>(stage + 1, odd, even);
            if constexpr (kSliced) {
                static_assert(S::kPerBlock == 2);
                if (now.ends_slice()) add_slice<kPairs>(now.slice());
                now.advance();
            }
        }
        group_wait<0>();
    }

    // The products of a slice are all under way.
    template <int kPairs>
    __device__ __forceinline__ void add_slice(int slice) {
        group_wait<0>();
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) {
#pragma unroll
            for (int j = 0; j < 2 * kPairs; ++j) {
                float4& kept = sums[(r * 2 * kPairs + j) * kThreads];
                float(&sum)[4] = acc[r][j];
                if (slice > 0) {
                    const float4 before = kept;
                    sum[0] += before.x, sum[1] += before.y, sum[2] += before.z, sum[3] += before.w;
                }
                if (slice < copied.slices - 1) {
                    kept = {sum[0], sum[1], sum[2], sum[3]};
                    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
                }
            }
        }
    }
};

template <Format kFormat, Epilogue kEpilogue, class Form, bool kSliced>
__global__ void __launch_bounds__(Form::kThreads, 1) packed_groups(const PackedGemm p, int slices) {
    using L = Layout<kFormat>;
    using S = GroupStage<kFormat, Form>;
    constexpr int kTokens = Form::kTokens, kGroupWarps = Form::kWarps, kGroupRows = Form::kRows;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int row_groups = (p.tiles + kGroupWarps * kGroupRows - 1) / (kGroupWarps * kGroupRows);
    const int units = num_items_of(p, kTokens) * row_groups;
    unsigned char* ring = aligned_shared_memory<kGroupAlign>();
    float4* sums = reinterpret_cast<float4*>(ring + Form::kStages * S::kBytes) + thread;
    const SlicedBlock first = {0, slices, p.blocks};

    for (int unit_index = blockIdx.x; unit_index < units; unit_index += gridDim.x) {
        const int item_index = unit_index / row_groups;
        const Item item = item_of(p, item_index, kTokens);
        const int first_tile = ((unit_index - item_index * row_groups) * kGroupWarps + warp) * kGroupRows;
        GroupUnit<kFormat, Form, kSliced> unit = {p, ring, sums, p.blocks * S::kPerBlock, first, first, {}, {}, {}, {}, {}, {}, {}};
#pragma unroll
        for (int i = 0; i < unit.kCopied; ++i) {
            const int column = thread / 8 + Form::kThreads / 8 * i;
            unit.used[i] = column < item.count;
            const int entry = item.begin + (unit.used[i] ? column : 0);
            const int row = slot_of(p, entry) / p.x_divisor;
            unit.token[i] = p.x + row * p.x_stride + item.group * p.x_group_stride;
        }
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) {
            // Warps behind the last tile repeat it and store nothing.
            const int tile = first_tile + r < p.tiles ? first_tile + r : p.tiles - 1;
            const int64_t block = (static_cast<int64_t>(item.group) * p.tiles + tile) * p.blocks;
            unit.codes[r] = p.codes + block * kBlockBytes + lane * 16;
            unit.scales[r] = p.scales + block * L::kScaleBytes + L::scale_offset(g, t);
            unit.later[r] = load_global8(unit.scales[r]);
        }
        sync_block();  // the stages of the previous unit are still being read
#pragma unroll 1
        for (int s = 0; s < unit.kUnderWay; ++s) unit.issue(s);
        // Tokens behind the item's last one are whatever the stage holds: their columns are not stored.
        if (item.count <= 32) {
            unit.template multiply<2>();
        } else if (item.count <= 48) {
            unit.template multiply<3>();
        } else if (item.count <= 64) {
            unit.template multiply<4>();
        } else if (item.count <= 80) {
            unit.template multiply<5>();
        } else {
            unit.template multiply<8>();
        }
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) {
            if (first_tile + r >= p.tiles) continue;
#pragma unroll
            for (int j = 0; j < kTokens / 8; ++j) {
                if (j * 8 >= item.count) break;
                store<kEpilogue>(p, item, first_tile + r, j * 8 + 2 * t, g, unit.acc[r][j][0], unit.acc[r][j][2]);
                store<kEpilogue>(p, item, first_tile + r, j * 8 + 2 * t + 1, g, unit.acc[r][j][1], unit.acc[r][j][3]);
            }
        }
        wait_copies<0>();
    }
}

template <Format kFormat, Epilogue kEpilogue, class Form, bool kSliced = false>
int launch_groups(const PackedGemm& p, int slices, int num_blocks, cudaStream_t stream) {
    constexpr int kSums = kSliced ? Form::kThreads * Form::kRows * Form::kTokens * 2 : 0;  // fp32, 16 rows a warp and tile
    constexpr int kShared = Form::kStages * GroupStage<kFormat, Form>::kBytes + kSums + kGroupAlign;
    static_assert(kShared <= 227 * 1024, "more than a multiprocessor has");
    const auto kernel = packed_groups<kFormat, kEpilogue, Form, kSliced>;
    const cudaError_t ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (ready != cudaSuccess) return ready;
    DIX_LAUNCH(kernel, num_blocks, Form::kThreads, kShared, stream, p, slices);
    return cudaGetLastError();
}

template <Epilogue kEpilogue>
int choose_groups(const PackedGemm& p, int format, int slices, int num_blocks, cudaStream_t stream) {
    const bool divided = slices == 4 || slices == 8;
    if (slices != 1 && (!divided || format != kFp8 || slices > p.blocks)) return cudaErrorInvalidValue;
    if (format == kFp8 && divided) return launch_groups<kFp8, kEpilogue, GroupForm<8, 2, 3>, true>(p, slices, num_blocks, stream);
    if (format == kFp8) return launch_groups<kFp8, kEpilogue, GroupForm<8, 2, 6>>(p, 1, num_blocks, stream);
    if (format == kFp4) return launch_groups<kFp4, kEpilogue, GroupForm<16, 1, 8>>(p, 1, num_blocks, stream);
    return cudaErrorInvalidValue;
}

}  // namespace dix

// As dix_packed_tiles, for columns of x in the order of products. Only a build for sm_90a multiplies anything. 
// slices: 1, for FP8 also 4 and 8 of at least as many blocks of columns, adds in the order of dix_packed_gemm with as many.
extern "C" int dix_packed_groups(const dix::PackedGemm* p, int format, int epilogue, int slices, int num_blocks, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (num_blocks < 1 || p->x_stride % 8 != 0 || p->x_group_stride % 8 != 0) return cudaErrorInvalidValue;
    if (epilogue == kSwiglu) return choose_groups<kSwiglu>(*p, format, slices, num_blocks, s);
    if (epilogue == kPlainBf16) return choose_groups<kPlainBf16>(*p, format, slices, num_blocks, s);
    return cudaErrorInvalidValue;
}
