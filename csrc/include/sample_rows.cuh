// What the sampling kernel is made of: its arguments, and a row in the shared memory of a cluster.
//
// A row's ids are cut into kPieces pieces, one for each thread block of a cluster. How they are cut does not depend on the other rows.
#pragma once

#include "cluster.cuh"

#include <cmath>

namespace dix {

constexpr int kPieces = 8;  // blocks of a cluster: the most that every device allows
enum Mode { kGreedy = 0, kRace = 1, kInverse = 2 };

struct SampleRows {
    const float* logits;       // [R, V], rows row_stride apart
    const float* temperature;  // [R], above 0 in drawn rows
    const int* modes;          // [R]
    const int64_t* numbers;    // [R] key of a race, or 53 random bits
    int64_t* ids;              // [R] results
    float* best;               // [R] largest logit of each row; NaN when one is NaN
    const int64_t* top_p;      // [R] in fixed point, or null where no row has a filter; 2^32 for none
    const int* top_k;          // [R]; num_ids for none
    const float* min_p;        // [R]; 0 for none
    int64_t row_stride;
    int num_rows, num_ids;
    // Threads of a block for rows that are read as a stream (greedy ones, races without filters) and for others, 128, 256 or 512; 0: no such rows.
    int streams, draws;
};

constexpr int kNoId = 0x7FFFFFFF;
constexpr int64_t kNoLimit = int64_t{1} << 32;  // of top_p: no weight of a row is as much

// The better of two logits: NaN above all, then the larger, then the lower id.
__device__ __forceinline__ bool above(float a, int a_id, float b, int b_id) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan || b_nan) return a_nan && (!b_nan || a_id < b_id);
    return a > b || (a == b && a_id < b_id);
}

// A number that is larger for the better of two logits, and the logit and the id in it. -0 counts as 0.
__device__ __forceinline__ uint64_t rank_of(float logit, int id) {
    return static_cast<uint64_t>(ordered(logit)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ float logit_of(uint64_t rank) {
    const int bits = static_cast<int>(static_cast<uint32_t>(rank >> 32) ^ 0x80000000u);
    return value_of(bits ^ (bits >> 31 & 0x7FFFFFFF));
}
__device__ __forceinline__ int id_of(uint64_t rank) { return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(rank)); }

// floor(p * 2^31); the numbers of a row add up to less than 2^32.
__device__ __forceinline__ uint32_t fixed_point(float probability) { return static_cast<uint32_t>(probability * 2147483648.0f); }

// floor(number / 2^53 * total) without overflow: 31 high bits and 22 low bits of the number.
__device__ __forceinline__ int64_t share_of_total(int64_t number, int64_t total) {
    return ((number >> 22) * total + (((number & ((1 << 22) - 1)) * total) >> 22)) >> 31;
}

// One block's ids, four by four: vector v belongs to thread v % kThreads, and `values` holds their logits, then their exponentials.
struct Piece {
    float* values;
    int begin, count, vectors;

    __device__ __forceinline__ float4& vector(int v) const { return reinterpret_cast<float4*>(values)[v]; }
};

__host__ __device__ __forceinline__ int piece_size(int num_ids) { return (num_ids + 4 * kPieces - 1) / (4 * kPieces) * 4; }

__device__ __forceinline__ Piece piece_of(const SampleRows& p, float* values) {
    const int size = piece_size(p.num_ids), begin = cluster_rank() * size, left = p.num_ids - begin;
    const int count = left < 0 ? 0 : left < size ? left : size;
    return {values, begin, count, (count + 3) / 4};
}

// Vectors whose logits come first; the maximum of these is taken while the others are on their way.
template <int kThreads>
__device__ __forceinline__ int first_vectors(const Piece& piece) {
    return piece.vectors / (2 * kThreads) * kThreads;
}

// Everything that the thread reads later is under way when this returns, in two groups of copies.
template <int kThreads>
__device__ __forceinline__ void start_loads(const Piece& piece, const float* logits) {
    const float* from = logits + piece.begin;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
    const int first = first_vectors<kThreads>(piece);
    for (int v = threadIdx.x; v < first; v += kThreads) start_vector(piece.values, v, piece.count, from, aligned, -INFINITY);
    commit_copies();
    for (int v = first + threadIdx.x; v < piece.vectors; v += kThreads) start_vector(piece.values, v, piece.count, from, aligned, -INFINITY);
    commit_copies();
}

// The best logit that a thread has seen.
struct Best {
    float logit = -INFINITY;
    int id = kNoId;
};

// id: of the first of four logits.
__device__ __forceinline__ void look_for_best(const float4& x, int id, Best& best) {
    const float most = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), sum = (x.x + x.y) + (x.z + x.w);
    if (!(most > best.logit) && sum == sum) return;  // a NaN shows in the sum
    const float four[4] = {x.x, x.y, x.z, x.w};
    for (int i = 0; i < 4; ++i) {
        if (above(four[i], id + i, best.logit, best.id)) best = {four[i], id + i};
    }
}

// What blocks of a cluster tell each other, and room for sums over a block.
template <int kThreads>
struct alignas(16) Board {
    uint64_t tops[kPieces], top_scratch[kThreads / 32];
    uint64_t times[kPieces], time_scratch[kThreads / 32];  // bits of positive doubles are in their order
    float sums[kPieces], sum_scratch[kThreads / 32];
    int time_ids[kPieces], id_scratch[kThreads / 32];
    uint32_t weights[kPieces], weight_scratch[kThreads / 32];
    uint32_t buffer[kThreads / 32];
    int64_t left;
    int share, found;
};

// The best logit of the row, told to all blocks.
template <int kThreads>
__device__ __forceinline__ Best best_of_row(const Best& mine, Board<kThreads>& board) {
    const auto better = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
    tell_all(over_block<kThreads>(rank_of(mine.logit, mine.id), board.top_scratch, better), board.tops);
    sync_told();
    const uint64_t best = over_slots(board.tops, better);
    return {logit_of(best), id_of(best)};
}

// By one block of the row.
__device__ __forceinline__ void write_token(const SampleRows& p, int row, int id, float top) {
    if (threadIdx.x != 0) return;
    // A row without a finite maximum has no token; the id has to exist all the same.
    p.ids[row] = id >= 0 && id < p.num_ids ? id : 0;
    p.best[row] = top;
}

__device__ __forceinline__ bool is_filtered(const SampleRows& p, int row) {
    return p.top_p != nullptr && (p.top_p[row] < kNoLimit || p.top_k[row] < p.num_ids || p.min_p[row] > 0.0f);
}
__device__ __forceinline__ bool is_stream(const SampleRows& p, int row) {
    return p.modes[row] == kGreedy || (p.modes[row] == kRace && !is_filtered(p, row));
}

}  // namespace dix
