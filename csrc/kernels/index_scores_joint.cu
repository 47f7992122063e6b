// Scores of packed index keys for many query rows of one sequence: those of index_scores.cu, to the bit, by warpgroups of SM90.
//
// A thread block holds the queries of 16 consecutive rows in shared memory. A warpgroup decodes 64 keys to registers once and multiplies
// them with the queries of all these rows that belong to one sequence, four rows a product; other warpgroups multiply while it adds up.
// Rows of several sequences in one block are walked sequence by sequence.
#include "index_keys.cuh"

namespace dix {

constexpr int kJointHeads = 32, kJointWords = 4;  // of width 128
// Rows of a thread block and of a product, warpgroups of a thread block, tiles under way in a warp.
constexpr int kJointRows = 16, kJointChunk = 4, kJointGroups = 3, kJointStages = 2;
constexpr int kJointThreads = 128 * kJointGroups;

// A warpgroup's 64 entries times the heads of kChunk rows, `query` the tile of the first of them. kJointRows * kQueryTile bytes behind are the
// other 64 channels of all.
template <int kChunk>
__device__ __forceinline__ void multiply_rows(float (&d)[4 * kChunk][4], const uint32_t (&a)[8][4], const unsigned char* query) {
    group_begin();
    group_multiply<2 * kChunk, false>(d, a[0], query, 0);
#pragma unroll
    for (int s = 1; s < 8; ++s) group_multiply<2 * kChunk>(d, a[s], query + s / 4 * (kJointRows * kQueryTile), s % 4);
    group_commit();
    group_wait<0>();
}

// Sums over the heads of one row, this lane's share: entries g and g + 8.
__device__ __forceinline__ void add_heads(const float (*d)[4], const float* weights, float (&sums)[2]) {
    const int quarter = threadIdx.x % 4;
    sums[0] = sums[1] = 0.0f;
#pragma unroll
    for (int t = 0; t < kJointHeads / 8; ++t) {
        const uint2 bits = load_shared8(weights + 8 * t + 2 * quarter);
        const float pair[2] = {value_of(static_cast<int>(bits.x)), value_of(static_cast<int>(bits.y))};
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i / 2] = fmaf(fmaxf(d[t][i], 0.0f), pair[i % 2], sums[i / 2]);
    }
}

// Exchanges one number of two with the lane `mask` away: adds what both hold of the number that stays here.
__device__ __forceinline__ float keep_one(float first, float second, int mask) {
    const bool high = threadIdx.x & mask;
    return (high ? second : first) + shuffle_xor(high ? first : second, mask);
}

struct JointRows {
    const float* weights;  // [kJointRows, 32] in shared memory, times 2^16
    const int* counts;     // [kJointRows]
    int64_t first;         // row of the launch that is row 0 here
    int end;               // rows from here on are not of this sequence
};

// One product and what becomes of it. kChunk 4, 2 or 1: rows row .. row + kChunk - 1, of which those before rows.end are stored.
template <int kChunk>
__device__ __forceinline__ void score_rows(const IndexScores& p, const JointRows& rows, int row, const unsigned char* query, int entry,
                                           const uint32_t (&a)[8][4]) {
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    float d[4 * kChunk][4];
    multiply_rows<kChunk>(d, a, query + row * kQueryTile);
    float sums[kChunk][2];
#pragma unroll
    for (int r = 0; r < kChunk; ++r) add_heads(d + 4 * r, rows.weights + (row + r) * kJointHeads, sums[r]);
    const auto put = [&](int r, int column, float value) {
        if (row + r < rows.end && column < rows.counts[row + r]) p.out[(rows.first + row + r) * p.out_stride + column] = value;
    };
    // Lanes 1 apart add first, then lanes 2 apart: the order of `finish` in index_scores.cu.
    if constexpr (kChunk == 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float low = keep_one(sums[0][i], sums[1][i], 1), high = keep_one(sums[2][i], sums[3][i], 1);
            put(quarter, entry + group + 8 * i, keep_one(low, high, 2));
        }
    } else if constexpr (kChunk == 2) {
        const float low = keep_one(sums[0][0], sums[1][0], 1), high = keep_one(sums[0][1], sums[1][1], 1);
        put(quarter % 2, entry + group + 8 * (quarter / 2), keep_one(low, high, 2));
    } else {
        const float one = keep_one(sums[0][0], sums[0][1], 1);
        const float both = one + shuffle_xor(one, 2);
        if (quarter < 2) put(0, entry + group + 8 * quarter, both);
    }
}

__global__ void __launch_bounds__(kJointThreads, 1) score_joint(const IndexScores p) {
    const int thread = threadIdx.x, warp = thread / 32;
    JointRows rows;
    rows.first = static_cast<int64_t>(blockIdx.x / p.programs) * kJointRows;
    const int there = p.num_rows - rows.first < kJointRows ? static_cast<int>(p.num_rows - rows.first) : kJointRows;
    unsigned char* query = aligned_shared_memory<1024>();
    unsigned char* behind = query + 2 * kJointRows * kQueryTile;
    float* weights = reinterpret_cast<float*>(behind);
    int* counts = reinterpret_cast<int*>(behind + kJointRows * kJointHeads * 4);
    const Ring<kJointWords> ring = {behind + kJointRows * (kJointHeads + 1) * 4 + warp * kJointStages * Ring<kJointWords>::kStage};
#pragma unroll 4
    for (int i = thread; i < there * kJointHeads * 16; i += kJointThreads) {
        place_query(p.q + (rows.first * kJointHeads + i / 16) * 128, query, kJointRows * kQueryTile, i / 16, i % 16);
    }
    for (int i = thread; i < there * kJointHeads; i += kJointThreads) weights[i] = bf16_value(p.weights[rows.first * kJointHeads + i]) * 65536.0f;
    if (thread < there) counts[thread] = static_cast<int>(p.count[rows.first + thread]);
    rows.weights = weights;
    rows.counts = counts;
    show_shared();
    sync_block();

    const int begin = (blockIdx.x % p.programs * kJointGroups + warp / 4) * 64 + warp % 4 * kTileEntries;  // this warp's first entry
    const int step = p.programs * (64 * kJointGroups);
    for (int first_row = 0; first_row < there; first_row = rows.end) {
        const int64_t seq = p.seq[rows.first + first_row];
        const int64_t* table = p.table + seq * p.table_stride;
        int most = 0;
        for (rows.end = first_row; rows.end < there && p.seq[rows.first + rows.end] == seq; ++rows.end) {
            most = counts[rows.end] > most ? counts[rows.end] : most;
        }
        const auto place = [&](int entry) { return find_tile(p, table, most, entry / kTileEntries); };
#pragma unroll
        for (int i = 0; i < kJointStages; ++i) {
            start_tile(p, ring, i, place(begin + i * step));
            commit_copies();
        }
        TilePlace next = place(begin + kJointStages * step);
        int stage = 0;
        for (int entry = begin; entry - warp % 4 * kTileEntries < most; entry += step) {
            wait_copies<kJointStages - 1>();
            uint32_t words[2][kJointWords], factors[2], a[8][4];
            read_keys<kJointWords>(ring, stage, words, factors);
            start_tile(p, ring, stage, next);
            commit_copies();
            next = place(entry + (kJointStages + 1) * step);
            stage = stage + 1 < kJointStages ? stage + 1 : 0;
            decode_tile(words, factors, a);
            int row = first_row;
#pragma unroll 1
            for (; rows.end - row > kJointChunk / 2; row += kJointChunk) score_rows<kJointChunk>(p, rows, row, query, entry, a);
            if (rows.end - row == 2) score_rows<2>(p, rows, row, query, entry, a);
            if (rows.end - row == 1) score_rows<1>(p, rows, row, query, entry, a);
        }
        wait_copies<0>();
    }
}

}  // namespace dix

// 32 heads of width 128, all entries of every row, whose blocks hold 16 or a multiple. programs: thread blocks that share 16 rows. Returns a
// cudaError_t.
extern "C" int dix_index_scores_joint(const dix::IndexScores* p, void* stream) {
    using namespace dix;
    if (p->num_heads != kJointHeads || p->width != 32 * kJointWords || p->allowed != nullptr || p->log_per_block < 4) return cudaErrorInvalidValue;
    if (p->num_rows == 0) return cudaSuccess;
    constexpr int kQueries = 2 * kJointRows * kQueryTile + kJointRows * (kJointHeads + 1) * 4;
    constexpr int kShared = 1024 + kQueries + 4 * kJointGroups * kJointStages * Ring<kJointWords>::kStage;
    static_assert(kShared <= 227 * 1024, "more than a multiprocessor has");
    const cudaError_t ready = cudaFuncSetAttribute(score_joint, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (ready != cudaSuccess) return ready;
    const int grid = (p->num_rows + kJointRows - 1) / kJointRows * p->programs;
    DIX_LAUNCH(score_joint, grid, kJointThreads, kShared, static_cast<cudaStream_t>(stream), *p);
    return cudaGetLastError();
}
