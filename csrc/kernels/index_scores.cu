// Scores of packed index keys: over the heads, the weighted sum of max(query . key, 0), in fp32.
//
// A warp multiplies 16 entries by all heads of one query row. Four lanes share an entry and decode a quarter of its channels each, straight
// into the registers that the tensor cores read: in which order a product adds its channels is ours to choose, and the query, which stays
// in registers as well, takes the same order. The keys of the next tiles are on their way meanwhile. An entry's score depends on its key
// and the query alone, not on where in a tile it lies or who else is scored.
#include "index_keys.cuh"

namespace dix {

constexpr int kScoreThreads = 128;
constexpr int kScoreWarps = kScoreThreads / 32;

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

// How a kernel of warpgroups looks entries up: `Alone` one by one, in candidate blocks or blocks of the cache of any size, `Tiles` by tiles of 16.
template <bool kRestricted>
struct Alone {
    static constexpr bool kCandidates = kRestricted;
    using Where = Places;
    const IndexScores& p;
    const int64_t* table;
    int64_t row;
    int count, columns;

    __device__ __forceinline__ Where at(int tile) const { return find<kRestricted>(p, row, table, count, columns, tile); }
    __device__ __forceinline__ void fetch(const Ring<4>& ring, int stage, const Where& where) const { start<4>(p, ring, stage, where); }
};

struct Tiles {
    static constexpr bool kCandidates = false;
    using Where = TilePlace;
    const IndexScores& p;
    const int64_t* table;
    int64_t row;
    int count, columns;

    __device__ __forceinline__ Where at(int tile) const { return find_tile(p, table, columns, tile); }
    __device__ __forceinline__ void fetch(const Ring<4>& ring, int stage, const Where& where) const { start_tile(p, ring, stage, where); }
};

// The same for 32 heads of width 128 by warpgroups of SM90: four warps multiply 64 entries at a time, the query is in shared memory, in the order
// in which the lanes have decoded channels.
template <class Lookup, int kStages, int kResidents>
__global__ void __launch_bounds__(kScoreThreads, kResidents) score_groups(const IndexScores p) {
    constexpr int kWords = 4, kHeadTiles = 4;
    const int thread = threadIdx.x, warp = thread / 32;
    const int64_t row = blockIdx.x / p.programs;
    const int count = static_cast<int>(p.count[row]);
    const int columns = Lookup::kCandidates ? p.num_allowed << p.log_size : count;
    const Lookup lookup = {p, p.table + p.seq[row] * p.table_stride, row, count, columns};
    const int step = p.programs * kScoreWarps;
    int first = blockIdx.x % p.programs * kScoreWarps;  // of four tiles
    if (first * kTileEntries >= columns) return;
    unsigned char* query = aligned_shared_memory<1024>();
    const Ring<kWords> ring = {query + 2 * kQueryTile + warp * kStages * Ring<kWords>::kStage};
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        lookup.fetch(ring, i, lookup.at(first + warp + i * step));
        commit_copies();
    }
    auto next = lookup.at(first + warp + kStages * step);
#pragma unroll
    for (int i = thread; i < 32 * 16; i += kScoreThreads) {
        place_query(p.q + (row * 32 + i / 16) * 128, query, kQueryTile, i / 16, i % 16);
    }
    float weights[kHeadTiles][2];
    read_weights<kHeadTiles>(p, row, weights);
    show_shared();
    sync_block();
    for (int stage = 0; first * kTileEntries < columns; first += step) {
        wait_copies<kStages - 1>();
        uint32_t words[2][kWords], factors[2], a[2 * kWords][4];
        read_keys<kWords>(ring, stage, words, factors);
        lookup.fetch(ring, stage, next);
        commit_copies();
        next = lookup.at(first + warp + (kStages + 1) * step);
        stage = stage + 1 < kStages ? stage + 1 : 0;
        float d[4][4];
        decode_tile(words, factors, a);
        group_begin();
        group_multiply<2, false>(d, a[0], query, 0);
#pragma unroll
        for (int s = 1; s < 2 * kWords; ++s) group_multiply<2>(d, a[s], query + s / 4 * kQueryTile, s % 4);
        group_commit();
        group_wait<0>();
        finish<kHeadTiles, Lookup::kCandidates>(p, row, count, columns, first + warp, d, weights);
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
        constexpr int kBytes = 1024 + 2 * kQueryTile + kScoreWarps * under_way * Ring<4>::kStage;               \
        if (p->allowed != nullptr) {                                                                            \
            DIX_LAUNCH((score_groups<Alone<true>, under_way, fitting>), grid, kScoreThreads, kBytes, s, *p);    \
        } else if (p->log_per_block < 4) {                                                                      \
            DIX_LAUNCH((score_groups<Alone<false>, under_way, fitting>), grid, kScoreThreads, kBytes, s, *p);   \
        } else {                                                                                                \
            DIX_LAUNCH((score_groups<Tiles, under_way, fitting>), grid, kScoreThreads, kBytes, s, *p);          \
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
