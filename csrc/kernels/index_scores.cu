// Scores of packed index keys: over the heads, the weighted sum of max(query . key, 0), in fp32.
//
// A warp multiplies 16 entries by all heads of one query row. Four lanes share an entry and decode a quarter of its channels each, straight
// into the registers that the tensor cores read: in which order a product adds its channels is ours to choose, and the query, which stays
// in registers as well, takes the same order. The keys of the next tiles are on their way meanwhile. An entry's score depends on its key
// and the query alone, not on where in a tile it lies or who else is scored.
#include "warpgroup.cuh"

#include <cmath>

namespace dix {

struct IndexScores {
    const uint16_t* q;        // [T, H, D] bf16
    const uint16_t* weights;  // [T, H] bf16
    const int64_t* seq;       // [T]
    const int64_t* count;     // [T] entries that a row sees
    const int* allowed;       // [T, num_allowed] candidate blocks, -1 for none; null where all entries are searched
    const uint8_t* blocks;    // D/2 bytes of E2M1 per entry, then D/32 scales per entry, `offset` bytes into each block
    const int64_t* table;     // [B, P]
    float* out;               // [T, columns]: entries, or members of the candidate blocks in their order
    int64_t block_bytes, offset, table_stride, out_stride;
    int num_rows, num_heads, width, num_allowed;
    int log_per_block, log_size;  // entries of a block of the cache, of a candidate block
    int programs;                 // thread blocks that share a row
    int groups;                   // by warpgroups of SM90
    int stages, residents;        // tiles under way, and thread blocks of a multiprocessor: which exist, see below
};

constexpr int kScoreThreads = 128;
constexpr int kScoreWarps = kScoreThreads / 32;
constexpr int kTileEntries = 16;
constexpr int kGroupTile = 32 * 128;  // bytes of 64 channels of 32 heads

// Where a lane's entries g and g + 8 of a tile are: blocks of the cache, and places in them, -1 where nothing is visible. Numbers as they are
// read, so that nothing waits for them before they are needed.
struct Places {
    int64_t block[2];
    int place[2];
};

template <bool kRestricted>
__device__ __forceinline__ bool entry_of(const IndexScores& p, int64_t row, int count, int columns, int column, int& entry) {
    entry = column;
    if (column >= columns) return false;
    if constexpr (kRestricted) {
        const int chosen = p.allowed[row * p.num_allowed + (column >> p.log_size)];
        entry = (chosen << p.log_size) + (column & ((1 << p.log_size) - 1));
        return chosen >= 0 && entry < count;
    }
    return true;
}

template <bool kRestricted>
__device__ __forceinline__ Places find(const IndexScores& p, int64_t row, const int64_t* table, int count, int columns, int tile) {
    Places places;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int column = tile * kTileEntries + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i;
        int entry;
        const bool seen = entry_of<kRestricted>(p, row, count, columns, column, entry);
        places.block[i] = seen ? table[entry >> p.log_per_block] : 0;
        places.place[i] = seen ? entry & ((1 << p.log_per_block) - 1) : -1;
    }
    return places;
}

// A lane's own keys and scales of the tiles under way, in shared memory. Nobody else reads them, so that lanes wait for their own copies only.
template <int kWords>
struct Ring {
    unsigned char* bytes;  // of this warp

    static constexpr int kStage = 32 * 2 * (4 * kWords + 4);

    __device__ __forceinline__ unsigned char* words(int stage, int i) const {
        return bytes + stage * kStage + (32 * i + static_cast<int>(threadIdx.x) % 32) * (4 * kWords);
    }
    __device__ __forceinline__ uint32_t* scales(int stage, int i) const {
        return reinterpret_cast<uint32_t*>(bytes + stage * kStage + 64 * 4 * kWords) + 32 * i + threadIdx.x % 32;
    }
};

template <int kWords>
__device__ __forceinline__ void start(const IndexScores& p, const Ring<kWords>& ring, int stage, const Places& places) {
    const int quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (places.place[i] < 0) continue;
        const uint8_t* block = p.blocks + places.block[i] * p.block_bytes + p.offset;
        const uint8_t* data = block + places.place[i] * (16 * kWords) + quarter * (4 * kWords);
        if constexpr (kWords == 4) copy_async16(ring.words(stage, i), data);
        if constexpr (kWords == 2) copy_async8(ring.words(stage, i), data);
        if constexpr (kWords == 1) copy_async4(ring.words(stage, i), data);
        // The four bytes in which this lane's scale is.
        copy_async4(ring.scales(stage, i), block + (16 * kWords << p.log_per_block) + (places.place[i] * kWords & ~3));
    }
}

// Four bf16 pairs (c, c + 4) of the channels 0 to 7 of a word: magnitude to bits 6..8, sign to 15, times a power of two.
__device__ __forceinline__ void decode(uint32_t word, uint32_t scale, uint32_t (&pairs)[4]) {
    constexpr uint32_t kSign = 0x80008000, kMagnitude = 0x01C001C0;
    pairs[0] = multiply_bf16x2((word << 12 & kSign) | (word << 6 & kMagnitude), scale);
    pairs[1] = multiply_bf16x2((word << 8 & kSign) | (word << 2 & kMagnitude), scale);
    pairs[2] = multiply_bf16x2((word << 4 & kSign) | (word >> 2 & kMagnitude), scale);
    pairs[3] = multiply_bf16x2((word & kSign) | (word >> 6 & kMagnitude), scale);
}

// E8M0 to the factor of an E2M1 value in bf16, twice: the scale * 2^126 / 2^16, which the weights multiply back. 6 * 2^17 and more: infinite.
__device__ __forceinline__ uint32_t factor(uint32_t scale) { return (scale < 145 ? scale + 110 : 255) * 0x00800080u; }

// What `start` brought of a tile: words of entries g and g + 8, and their factors.
template <int kWords>
__device__ __forceinline__ void read_keys(const Ring<kWords>& ring, int stage, uint32_t (&words)[2][kWords], uint32_t (&factors)[2]) {
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned char* mine = ring.words(stage, i);
        if constexpr (kWords == 4) {
            const uint4 read = load_shared16(mine);
            words[i][0] = read.x;
            words[i][1] = read.y;
            words[i][2] = read.z;
            words[i][3] = read.w;
        } else if constexpr (kWords == 2) {
            const uint2 read = load_shared8(mine);
            words[i][0] = read.x;
            words[i][1] = read.y;
        } else {
            words[i][0] = *reinterpret_cast<const uint32_t*>(mine);
        }
        const int byte = ((group + 8 * i) * kWords + quarter * kWords / 4) % 4;  // tiles begin at multiples of 16 entries
        factors[i] = factor(*ring.scales(stage, i) >> (8 * byte) & 0xFF);
    }
}

template <int kHeadTiles>
__device__ __forceinline__ void read_weights(const IndexScores& p, int64_t row, float (&weights)[kHeadTiles][2]) {
    const uint16_t* from = p.weights + row * p.num_heads + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
        weights[t][0] = bf16_value(from[8 * t]) * 65536.0f;
        weights[t][1] = bf16_value(from[8 * t + 1]) * 65536.0f;
    }
}

// Sums over the heads from products with all of them, and their place.
template <int kHeadTiles, bool kRestricted, int kSize>
__device__ __forceinline__ void finish(const IndexScores& p, int64_t row, int count, int columns, int tile, const float (&d)[kSize][4],
                                       const float (&weights)[kHeadTiles][2]) {
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i / 2] = fmaf(fmaxf(d[t][i], 0.0f), weights[t][i % 2], sums[i / 2]);
    }
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
        sums[0] += shuffle_xor(sums[0], mask);
        sums[1] += shuffle_xor(sums[1], mask);
    }
    // Lane 0 of four writes entry g, lane 1 entry g + 8.
    const int column = tile * kTileEntries + group + 8 * quarter;
    if (quarter < 2 && column < columns) {
        int entry;
        const bool seen = entry_of<kRestricted>(p, row, count, columns, column, entry);
        p.out[row * p.out_stride + column] = seen ? (quarter == 0 ? sums[0] : sums[1]) : -INFINITY;
    }
}

// kStages: tiles under way. kResidents: thread blocks whose registers fit a multiprocessor.
template <int kWords, int kHeadTiles, bool kRestricted, int kStages, int kResidents>
__global__ void __launch_bounds__(kScoreThreads, kResidents) score(const IndexScores p) {
    const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4, warp = threadIdx.x / 32;
    const int64_t row = blockIdx.x / p.programs;
    const int count = static_cast<int>(p.count[row]);
    const int columns = kRestricted ? p.num_allowed << p.log_size : count;
    const int64_t* table = p.table + p.seq[row] * p.table_stride;
    const int step = p.programs * kScoreWarps;
    int tile = blockIdx.x % p.programs * kScoreWarps + warp;
    if (tile * kTileEntries >= columns) return;
    const Ring<kWords> ring = {shared_memory() + warp * kStages * Ring<kWords>::kStage};
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        start<kWords>(p, ring, i, find<kRestricted>(p, row, table, count, columns, tile + i * step));
        commit_copies();
    }
    Places next = find<kRestricted>(p, row, table, count, columns, tile + kStages * step);

    uint32_t q[2 * kWords][kHeadTiles][2];
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
        const uint16_t* from = p.q + (row * p.num_heads + 8 * t + group) * (32 * kWords) + quarter * (8 * kWords);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint4 read = load_global16(from + 8 * w);
            q[2 * w][t][0] = select_bytes(read.x, read.z, 0x5410);
            q[2 * w][t][1] = select_bytes(read.x, read.z, 0x7632);
            q[2 * w + 1][t][0] = select_bytes(read.y, read.w, 0x5410);
            q[2 * w + 1][t][1] = select_bytes(read.y, read.w, 0x7632);
        }
    }
    float weights[kHeadTiles][2];
    read_weights<kHeadTiles>(p, row, weights);
    for (int stage = 0; tile * kTileEntries < columns; tile += step) {
        wait_copies<kStages - 1>();
        uint32_t words[2][kWords], factors[2];
        read_keys<kWords>(ring, stage, words, factors);
        start<kWords>(p, ring, stage, next);
        commit_copies();
        next = find<kRestricted>(p, row, table, count, columns, tile + (kStages + 1) * step);
        stage = stage + 1 < kStages ? stage + 1 : 0;
        float d[kHeadTiles][4] = {};
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            uint32_t low[4], high[4];
            decode(words[0][w], factors[0], low);
            decode(words[1][w], factors[1], high);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t a[4] = {low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1]};
#pragma unroll
                for (int t = 0; t < kHeadTiles; ++t) mma_bf16(d[t], a, q[2 * w + half][t][0], q[2 * w + half][t][1]);
            }
        }
        finish<kHeadTiles, kRestricted>(p, row, count, columns, tile, d, weights);
    }
    wait_copies<0>();
}

// The same for 32 heads of width 128 by warpgroups of SM90: four warps multiply 64 entries at a time, the query is in shared memory, in the order
// in which the lanes have decoded channels.
template <bool kRestricted, int kStages, int kResidents>
__global__ void __launch_bounds__(kScoreThreads, kResidents) score_groups(const IndexScores p) {
    constexpr int kWords = 4, kHeadTiles = 4;
    const int thread = threadIdx.x, warp = thread / 32;
    const int64_t row = blockIdx.x / p.programs;
    const int count = static_cast<int>(p.count[row]);
    const int columns = kRestricted ? p.num_allowed << p.log_size : count;
    const int64_t* table = p.table + p.seq[row] * p.table_stride;
    const int step = p.programs * kScoreWarps;
    int first = blockIdx.x % p.programs * kScoreWarps;  // of four tiles
    if (first * kTileEntries >= columns) return;
    unsigned char* query = aligned_shared_memory<1024>();
    const Ring<kWords> ring = {query + 2 * kGroupTile + warp * kStages * Ring<kWords>::kStage};
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        start<kWords>(p, ring, i, find<kRestricted>(p, row, table, count, columns, first + warp + i * step));
        commit_copies();
    }
    Places next = find<kRestricted>(p, row, table, count, columns, first + warp + kStages * step);
    // Step 2 w + h of a product multiplies, of quarter t, channels 2 h, 2 h + 4 | 2 h + 1, 2 h + 5 of word w: columns 2 t.. and 2 t + 8.. of its 16.
    for (int i = thread; i < 32 * 16; i += kScoreThreads) {
        const int head = i / 16, quarter = i / 4 % 4, w = i % 4;
        const uint4 read = load_global16(p.q + (row * 32 + head) * 128 + quarter * 32 + 8 * w);
        const uint32_t pairs[2][2] = {{select_bytes(read.x, read.z, 0x5410), select_bytes(read.x, read.z, 0x7632)},
                                      {select_bytes(read.y, read.w, 0x5410), select_bytes(read.y, read.w, 0x7632)}};
        for (int h = 0; h < 2; ++h) {
            for (int half = 0; half < 2; ++half) {
                const int piece = 2 * ((2 * w + h) % 4) + half;
                unsigned char* to = query + (2 * w + h) / 4 * kGroupTile + head * 128 + (piece ^ head % 8) * 16 + quarter * 4;
                *reinterpret_cast<uint32_t*>(to) = pairs[h][half];
            }
        }
    }
    float weights[kHeadTiles][2];
    read_weights<kHeadTiles>(p, row, weights);
    show_shared();
    sync_block();
    for (int stage = 0; first * kTileEntries < columns; first += step) {
        wait_copies<kStages - 1>();
        uint32_t words[2][kWords], factors[2], a[2 * kWords][4];
        read_keys<kWords>(ring, stage, words, factors);
        start<kWords>(p, ring, stage, next);
        commit_copies();
        next = find<kRestricted>(p, row, table, count, columns, first + warp + (kStages + 1) * step);
        stage = stage + 1 < kStages ? stage + 1 : 0;
        float d[16][4] = {};
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            uint32_t low[4], high[4];
            decode(words[0][w], factors[0], low);
            decode(words[1][w], factors[1], high);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                a[2 * w + half][0] = low[2 * half];
                a[2 * w + half][1] = high[2 * half];
                a[2 * w + half][2] = low[2 * half + 1];
                a[2 * w + half][3] = high[2 * half + 1];
            }
        }
        group_begin();
#pragma unroll
        for (int s = 0; s < 2 * kWords; ++s) group_multiply<2>(d, a[s], query + s / 4 * kGroupTile, s % 4);
        group_commit();
        group_wait();
        finish<kHeadTiles, kRestricted>(p, row, count, columns, first + warp, d, weights);
    }
    wait_copies<0>();
}

}  // namespace dix

// Returns a cudaError_t; cudaErrorInvalidValue for widths and numbers of heads that are not listed here.
extern "C" int dix_index_scores(const dix::IndexScores* p, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (p->num_rows == 0) return cudaSuccess;
    const int grid = p->num_rows * p->programs;
#define DIX_SCORE(words, tiles, under_way, fitting)                                                             \
    if (p->width == 32 * words && p->num_heads == 8 * tiles && p->stages == under_way && p->residents == fitting) { \
        constexpr int kBytes = kScoreWarps * under_way * Ring<words>::kStage;                                   \
        if (p->allowed != nullptr) {                                                                            \
            DIX_LAUNCH((score<words, tiles, true, under_way, fitting>), grid, kScoreThreads, kBytes, s, *p);    \
        } else {                                                                                                \
            DIX_LAUNCH((score<words, tiles, false, under_way, fitting>), grid, kScoreThreads, kBytes, s, *p);   \
        }                                                                                                       \
        return cudaGetLastError();                                                                              \
    }
#define DIX_SCORE_GROUPS(under_way, fitting)                                                                    \
    if (p->groups && p->width == 128 && p->num_heads == 32 && p->stages == under_way && p->residents == fitting) { \
        constexpr int kBytes = 1024 + 2 * kGroupTile + kScoreWarps * under_way * Ring<4>::kStage;               \
        if (p->allowed != nullptr) {                                                                            \
            DIX_LAUNCH((score_groups<true, under_way, fitting>), grid, kScoreThreads, kBytes, s, *p);           \
        } else {                                                                                                \
            DIX_LAUNCH((score_groups<false, under_way, fitting>), grid, kScoreThreads, kBytes, s, *p);          \
        }                                                                                                       \
        return cudaGetLastError();                                                                              \
    }
    DIX_SCORE_GROUPS(4, 4)
    DIX_SCORE_GROUPS(4, 5)
    if (p->groups) return cudaErrorInvalidValue;
    DIX_SCORE(4, 4, 4, 3)
    DIX_SCORE(4, 4, 4, 4)
    DIX_SCORE(4, 4, 8, 3)
    DIX_SCORE(4, 4, 8, 4)
    DIX_SCORE(4, 2, 4, 4)
    DIX_SCORE(2, 2, 4, 4)
    DIX_SCORE(1, 2, 4, 4)
    DIX_SCORE(1, 4, 4, 4)
#undef DIX_SCORE
#undef DIX_SCORE_GROUPS
    return cudaErrorInvalidValue;
}
