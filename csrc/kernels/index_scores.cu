// Scores of packed index keys: over the heads, the weighted sum of max(query . key, 0), in fp32.
//
// A warp multiplies 16 entries by all heads of one query row. Four lanes share an entry and decode a quarter of its channels each, straight
// into the registers that the tensor cores read: in which order a product adds its channels is ours to choose, and the query, which stays
// in registers as well, takes the same order. The keys of the next tiles are on their way meanwhile. An entry's score depends on its key
// and the query alone, not on where in a tile it lies or who else is scored.
#include "warp.cuh"

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
    int ahead;                    // tiles under way, 2 where nothing else is listed below
};

constexpr int kScoreThreads = 128;
constexpr int kScoreWarps = kScoreThreads / 32;
constexpr int kTileEntries = 16;

// What a lane reads of entries g and g + 8 of a tile: eight channels a word.
template <int kWords>
struct Keys {
    uint32_t words[2][kWords];
    uint32_t scale[2];
    bool seen[2];
};

template <int kWords, bool kRestricted>
__device__ __forceinline__ Keys<kWords> fetch(const IndexScores& p, int64_t row, const int64_t* table, int count, int columns, int tile) {
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    Keys<kWords> keys;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int column = tile * kTileEntries + group + 8 * i;
        int entry = column;
        bool seen = column < columns;
        if constexpr (kRestricted) {
            const int chosen = seen ? p.allowed[row * p.num_allowed + (column >> p.log_size)] : -1;
            entry = (chosen << p.log_size) + (column & ((1 << p.log_size) - 1));
            seen = chosen >= 0 && entry < count;
        }
        keys.seen[i] = seen;
        keys.scale[i] = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) keys.words[i][w] = 0;
        if (!seen) continue;
        const int place = entry & ((1 << p.log_per_block) - 1);
        const uint8_t* base = p.blocks + table[entry >> p.log_per_block] * p.block_bytes + p.offset;
        const uint8_t* data = base + place * (16 * kWords) + quarter * (4 * kWords);
        if constexpr (kWords == 4) {
            const uint4 read = load_global16(data);
            keys.words[i][0] = read.x;
            keys.words[i][1] = read.y;
            keys.words[i][2] = read.z;
            keys.words[i][3] = read.w;
        } else if constexpr (kWords == 2) {
            const uint2 read = load_global8(data);
            keys.words[i][0] = read.x;
            keys.words[i][1] = read.y;
        } else {
            keys.words[i][0] = *reinterpret_cast<const uint32_t*>(data);
        }
        keys.scale[i] = base[(16 * kWords << p.log_per_block) + place * kWords + quarter * kWords / 4];
    }
    return keys;
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

// kAhead: tiles under way. Of the largest shape, one leaves registers for four blocks a multiprocessor, more for three.
template <int kWords, int kHeadTiles, bool kRestricted, int kAhead>
__global__ void __launch_bounds__(kScoreThreads, kAhead == 1 ? 4 : 3) score(const IndexScores p) {
    const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const int64_t row = blockIdx.x / p.programs;
    const int count = static_cast<int>(p.count[row]);
    const int columns = kRestricted ? p.num_allowed << p.log_size : count;
    const int64_t* table = p.table + p.seq[row] * p.table_stride;
    const int step = p.programs * kScoreWarps;
    int tile = blockIdx.x % p.programs * kScoreWarps + threadIdx.x / 32;
    if (tile * kTileEntries >= columns) return;
    Keys<kWords> ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = fetch<kWords, kRestricted>(p, row, table, count, columns, tile + i * step);

    uint32_t q[2 * kWords][kHeadTiles][2];
    float weights[kHeadTiles][2];
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
#pragma unroll
        for (int i = 0; i < 2; ++i) weights[t][i] = bf16_value(p.weights[row * p.num_heads + 8 * t + 2 * quarter + i]) * 65536.0f;
    }
#pragma unroll kAhead
    for (; tile * kTileEntries < columns; tile += step) {
        const Keys<kWords> keys = ahead[0];
#pragma unroll
        for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
        ahead[kAhead - 1] = fetch<kWords, kRestricted>(p, row, table, count, columns, tile + kAhead * step);
        const uint32_t factors[2] = {factor(keys.scale[0]), factor(keys.scale[1])};
        float d[kHeadTiles][4] = {};
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            uint32_t low[4], high[4];
            decode(keys.words[0][w], factors[0], low);
            decode(keys.words[1][w], factors[1], high);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t a[4] = {low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1]};
#pragma unroll
                for (int t = 0; t < kHeadTiles; ++t) mma_bf16(d[t], a, q[2 * w + half][t][0], q[2 * w + half][t][1]);
            }
        }
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
        const bool seen = quarter == 0 ? keys.seen[0] : keys.seen[1];
        if (quarter < 2 && column < columns) p.out[row * p.out_stride + column] = seen ? (quarter == 0 ? sums[0] : sums[1]) : -INFINITY;
    }
}

}  // namespace dix

// Returns a cudaError_t; cudaErrorInvalidValue for widths and numbers of heads that are not listed here.
extern "C" int dix_index_scores(const dix::IndexScores* p, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (p->num_rows == 0) return cudaSuccess;
    const int grid = p->num_rows * p->programs;
#define DIX_SCORE(words, tiles, under_way)                                                   \
    if (p->width == 32 * words && p->num_heads == 8 * tiles && p->ahead == under_way) {      \
        if (p->allowed != nullptr) {                                                         \
            DIX_LAUNCH((score<words, tiles, true, under_way>), grid, kScoreThreads, 0, s, *p);  \
        } else {                                                                             \
            DIX_LAUNCH((score<words, tiles, false, under_way>), grid, kScoreThreads, 0, s, *p); \
        }                                                                                    \
        return cudaGetLastError();                                                           \
    }
    DIX_SCORE(4, 4, 1)
    DIX_SCORE(4, 4, 2)
    DIX_SCORE(4, 4, 3)
    DIX_SCORE(4, 2, 2)
    DIX_SCORE(2, 2, 2)
    DIX_SCORE(1, 2, 2)
    DIX_SCORE(1, 4, 2)
#undef DIX_SCORE
    return cudaErrorInvalidValue;
}
