// Packed index keys as both scoring kernels read them: where an entry is, its bytes on their way, and its decoding.
#pragma once

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

constexpr int kTileEntries = 16;
constexpr int kQueryTile = 32 * 128;  // bytes of 64 channels of 32 heads

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

// Where a tile of 16 entries is whose block holds all of them: one look-up for all lanes, and addresses that differ by constants.
struct TilePlace {
    int64_t block;
    int place;  // of the first entry, -1 where none is visible
};

__device__ __forceinline__ TilePlace find_tile(const IndexScores& p, const int64_t* table, int columns, int tile) {
    const int first = tile * kTileEntries;
    const bool seen = first < columns;
    return {seen ? table[first >> p.log_per_block] : 0, seen ? first & ((1 << p.log_per_block) - 1) : -1};
}

__device__ __forceinline__ void start_tile(const IndexScores& p, const Ring<4>& ring, int stage, const TilePlace& tile) {
    if (tile.place < 0) return;
    const int entry = tile.place + static_cast<int>(threadIdx.x) % 32 / 4, quarter = threadIdx.x % 4;
    const uint8_t* block = p.blocks + tile.block * p.block_bytes + p.offset;
    const uint8_t* data = block + entry * 64 + quarter * 16;
    const uint8_t* scales = block + (64 << p.log_per_block) + entry * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        copy_async16(ring.words(stage, i), data + i * (8 * 64));
        copy_async4(ring.scales(stage, i), scales + i * (8 * 4));
    }
}

// Of the query, channels of a 64-channel tile in the order in which `decode` leaves keys: step 2 w + h of a product multiplies, of quarter t,
// channels 2 h, 2 h + 4 | 2 h + 1, 2 h + 5 of word w: columns 2 t.. and 2 t + 8.. of its 16. Piece i of 16 of a head of width 128 goes to two
// tiles `tile_bytes` apart.
__device__ __forceinline__ void place_query(const uint16_t* from, unsigned char* to, int tile_bytes, int head, int i) {
    const int quarter = i / 4, w = i % 4;
    const uint4 read = load_global16(from + quarter * 32 + 8 * w);
    const uint32_t pairs[2][2] = {{select_bytes(read.x, read.z, 0x5410), select_bytes(read.x, read.z, 0x7632)},
                                  {select_bytes(read.y, read.w, 0x5410), select_bytes(read.y, read.w, 0x7632)}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int piece = 2 * ((2 * w + h) % 4) + half;
            unsigned char* at = to + (2 * w + h) / 4 * tile_bytes + head * 128 + (piece ^ head % 8) * 16 + quarter * 4;
            *reinterpret_cast<uint32_t*>(at) = pairs[h][half];
        }
    }
}

// Operands of the products with 16 entries of width 128.
__device__ __forceinline__ void decode_tile(const uint32_t (&words)[2][4], const uint32_t (&factors)[2], uint32_t (&a)[8][4]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
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
}

}  // namespace dix
