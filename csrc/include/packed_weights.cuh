// Weights in the order of use, as both products of packed weights read them (engine/ops/packed_weights.py writes it).
//
// 16 rows times 256 (FP4) or 128 (FP8) columns are one block of 2,048 bytes in four chunks of 512; the 16 bytes that a lane reads of a
// chunk are its own operands of mma.m16n8k16, with weights as the 16-row operand and up to 8 tokens as columns. Codes become bf16 in
// registers, exactly. A column of an mma depends on that column of the tokens alone: columns without a token may hold anything.
#pragma once

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
    const int* slots;             // rows of y of each item's tokens; their row of x is slot / x_divisor; null: entry i is row i
    const int64_t* groups;        // with items null: group of each of num_rows rows, every row an item of its own; null: see items
    const float* weights;         // factor of each slot for kSwiglu, null for 1
    int64_t x_stride, x_group_stride, y_stride, y_group_stride;
    int tiles, blocks, rows, num_rows, num_groups, x_divisor;
    float limit;
};

constexpr int kBlockBytes = 2048;

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

struct Item {
    int group, begin, count;
};

// Item `item` of a launch whose items hold up to `rows` tokens.
__device__ __forceinline__ Item item_of(const PackedGemm& p, int item, int rows) {
    if (p.items != nullptr) return {p.items[4 * item], p.items[4 * item + 1], p.items[4 * item + 2]};
    if (p.groups != nullptr) return {static_cast<int>(p.groups[item]), item, 1};
    const int begin = item / p.num_groups * rows, left = p.num_rows - begin;
    return {item % p.num_groups, begin, left < rows ? left : rows};
}

__device__ __forceinline__ int slot_of(const PackedGemm& p, int entry) { return p.slots != nullptr ? p.slots[entry] : entry; }

__device__ __forceinline__ int num_items_of(const PackedGemm& p, int rows) {
    if (p.groups != nullptr) return p.num_rows;
    return p.items != nullptr ? *p.num_items : (p.num_rows + rows - 1) / rows * p.num_groups;
}

template <Epilogue kEpilogue>
__device__ __forceinline__ void store(const PackedGemm& p, const Item& item, int tile, int column, int g, float upper, float lower) {
    if (column >= item.count) return;
    const int slot = slot_of(p, item.begin + column);
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

}  // namespace dix
