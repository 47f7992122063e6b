// The k best scores of each row, ascending by index; ties go to the lower index, -inf is never picked.
//
// A cluster of blocks shares a row, in its shared memory if it fits. The short way: every thread takes the largest of four groups of scores; a
// level that k groups reach has k scores or more above it, and hardly more than that. Those go to the first block, which finds the k-th best.
// The long way, where they are too many: two or three rounds over the digits of all scores; every block counts how many of its scores have
// the digits found so far and which one comes next, the first block adds the counts up. What is above the k-th best, and as many of its ties
// as are needed, is then written in order. How a row is divided changes no result.
#include "cluster.cuh"

#include <cmath>

namespace dix {

struct SelectRows {
    const float* scores;   // [T, columns], rows `stride` apart
    const int64_t* count;  // [T] scores of a row that exist, or null for all columns
    int* out;              // [T, width] indices, -1 behind; null for out64
    int64_t* out64;
    int64_t stride;
    int num_rows, columns, k, width;
    int room;   // scores that a block's shared memory holds
    int lists;  // 1: the short way is tried first
};

constexpr int kDigit = 11;
constexpr int kDigitBins = 1 << kDigit;  // digits of 11, 11 and 10 bits
constexpr uint32_t kNothing = 0x007FFFFF;  // -inf in order: only what is above it exists
constexpr int kListed = kDigitBins / 2;   // scores that the first block takes: their list lies where bins were
constexpr int kGroups = 4;                // of a thread, one for each place of a vector

template <int kThreads, int kBlocks>
struct alignas(16) SelectBoard {
    union {
        unsigned bins[kDigitBins];
        uint2 list[kListed];  // a score in order, and its index
    };
    uint32_t scratch[kThreads / 32];
    uint64_t sums[kThreads / 32];
    uint64_t totals[kBlocks];
    float lows[kBlocks], highs[kBlocks], scratch_low[kThreads / 32];
    int listed[kBlocks];
    int found[3];  // digit or -1, how many are before it, how many have it
};

// The sums of the thread's bins over all blocks.
template <int kThreads, int kBlocks>
__device__ __forceinline__ void add_bins(SelectBoard<kThreads, kBlocks>& board, unsigned (&counts)[kDigitBins / kThreads]) {
    constexpr int kMine = kDigitBins / kThreads;
    static_assert(kMine % 4 == 0);
#pragma unroll
    for (int i = 0; i < kMine; ++i) counts[i] = 0;
#pragma unroll
    for (int rank = 0; rank < kBlocks; ++rank) {
        const unsigned* theirs = of_rank(board.bins, rank) + static_cast<int>(threadIdx.x) * kMine;
#pragma unroll
        for (int i = 0; i < kMine; i += 4) {
            const uint4 read = load_shared16(theirs + i);
            counts[i] += read.x;
            counts[i + 1] += read.y;
            counts[i + 2] += read.z;
            counts[i + 3] += read.w;
        }
    }
}

// By the block of rank 0: the bin of the k-th best, told to all. The bins of all blocks are complete.
template <int kThreads, int kBlocks>
__device__ __forceinline__ void find_digit(SelectBoard<kThreads, kBlocks>& board, int bins, int before, int k) {
    constexpr int kMine = kDigitBins / kThreads;
    const int first = static_cast<int>(threadIdx.x) * kMine;
    unsigned counts[kMine];
    add_bins(board, counts);
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) mine += counts[i];
    int here = before + static_cast<int>(sum_before<kThreads>(mine, board.sums));
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
        const int with = static_cast<int>(counts[i]);
        if (here < k && here + with >= k) {
            set_all<kBlocks>(&board.found[0], bins - 1 - (first + i));
            set_all<kBlocks>(&board.found[1], here);
            set_all<kBlocks>(&board.found[2], with);
        }
        here += with;
    }
}

// The key above which fewer than k scores are, and k or more with the ones that equal it; `kNothing` when there are fewer than k in all.
template <int kThreads, int kBlocks>
__device__ __forceinline__ uint32_t find_threshold(const float* values, int count, int k, SelectBoard<kThreads, kBlocks>& board) {
    const int thread = threadIdx.x;
    // Every thread has a score of at least `least`, so that with k threads or more no score below it is among the best. That spares most
    // scores the count, in which those that are alike wait for each other.
    uint32_t largest = 0;
#pragma unroll 8
    for (int i = thread; i < count; i += kThreads) {
        const uint32_t key = ordered(values[i]);
        largest = key > largest ? key : largest;
    }
    uint32_t least = over_block<kThreads>(largest, board.scratch, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
    if (k > kThreads) least = 0;
    uint32_t prefix = 0;
    int before = 0;
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
        const int bits = shift == 0 ? 10 : kDigit, bins = 1 << bits;
        for (int bin = thread; bin < kDigitBins; bin += kThreads) board.bins[bin] = 0;
        if (thread == 0) board.found[0] = -1;
        sync_block();
#pragma unroll 8
        for (int i = thread; i < count; i += kThreads) {
            const uint32_t key = ordered(values[i]);
            // As far as the digits of this round go: what has the same ones is all counted.
            if (key > kNothing && key >> shift >= least >> shift && (shift == 21 || key >> (shift + bits) == prefix)) {
                atomic_add_shared(&board.bins[bins - 1 - (key >> shift & (bins - 1))], 1u);  // the best first
            }
        }
        sync_block();
        sync_told();
        if (cluster_rank() == 0) find_digit(board, bins, before, k);
        sync_cluster(cluster_rank() == 0);
        if (board.found[0] < 0) return kNothing;  // in the first round only
        prefix = prefix << bits | static_cast<uint32_t>(board.found[0]);
        before = board.found[1];
        const bool whole = before + board.found[2] == k;
        sync_block();
        if (whole) return (prefix << shift) - 1;  // all with these digits are among the best
    }
    return prefix;
}

// Bins of equal width between the least and the largest group: what may be among the k best is at `least` or above. Both are the same in all
// blocks, and a score's place among the bins grows with the score, so that ties are in or out together.
struct Level {
    float low, scale, least;
    __device__ __forceinline__ float place(float x) const { return (x - low) * scale; }
    __device__ __forceinline__ bool reached(float x) const { return !(place(x) < least) && !(x <= -INFINITY); }  // by a NaN too
};

// The level that k groups of the cluster reach; false where there are fewer.
template <int kThreads, int kBlocks>
__device__ __forceinline__ bool find_level(const float* values, int count, int k, SelectBoard<kThreads, kBlocks>& board, Level& level) {
    const int thread = threadIdx.x;
    float most[kGroups] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll 4
    for (int v = thread; 4 * v < count; v += kThreads) {
        const float4 x = reinterpret_cast<const float4*>(values)[v];
        most[0] = fmaxf(most[0], x.x);
        most[1] = fmaxf(most[1], x.y);
        most[2] = fmaxf(most[2], x.z);
        most[3] = fmaxf(most[3], x.w);
    }
    float low = INFINITY, high = -INFINITY;
    for (const float x : most) {
        if (x > -INFINITY) low = fminf(low, x);
        high = fmaxf(high, x);
    }
    for (int bin = thread; bin < kDigitBins; bin += kThreads) board.bins[bin] = 0;
    if (thread == 0) board.found[0] = -1;
    const auto least = [](float a, float b) { return fminf(a, b); };
    const auto largest = [](float a, float b) { return fmaxf(a, b); };
    tell_all(over_block<kThreads>(low, board.scratch_low, least), board.lows);
    tell_all(over_block<kThreads>(high, board.scratch_low, largest), board.highs);
    sync_told();
    level.low = over_slots(board.lows, least);
    level.scale = (kDigitBins - 1) / (over_slots(board.highs, largest) - level.low);
    for (const float x : most) {
        const float place = level.place(x);
        const int bin = place < kDigitBins - 1 ? static_cast<int>(place) : kDigitBins - 1;
        if (x > -INFINITY) atomic_add_shared(&board.bins[kDigitBins - 1 - bin], 1u);  // the best first
    }
    sync_block();
    sync_told();
    constexpr int kMine = kDigitBins / kThreads;
    unsigned counts[kMine];
    add_bins(board, counts);
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) mine += counts[i];
    int here = static_cast<int>(sum_before<kThreads>(mine, board.sums));
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
        const int with = static_cast<int>(counts[i]);
        if (here < k && here + with >= k) board.found[0] = kDigitBins - 1 - (thread * kMine + i);
        here += with;
    }
    sync_block();
    level.least = static_cast<float>(board.found[0]);
    return board.found[0] >= 0;
}

// Brings what reaches the level to the first block, in order; returns how many there are, or -1 when they are too many.
template <int kThreads, int kBlocks>
__device__ __forceinline__ int bring(const float* values, int begin, int count, const Level& level, SelectBoard<kThreads, kBlocks>& board) {
    const Share share = share_of<kThreads>(count);
    int mine = 0;
#pragma unroll 8
    for (int i = share.begin; i < share.end; ++i) mine += level.reached(values[i]);
    uint64_t total;
    int place = static_cast<int>(sum_before<kThreads>(static_cast<uint64_t>(mine), board.sums, total));
    tell_all(static_cast<int>(total), board.listed);
    sync_told();  // and nobody reads bins any more
    int all = 0;
    for (int rank = 0; rank < kBlocks; ++rank) {
        if (rank == cluster_rank()) place += all;
        all += board.listed[rank];
    }
    if (all > kListed) return -1;
    if (mine > 0) {
        uint2* list = of_rank(board.list, 0);
        for (int i = share.begin; i < share.end; ++i) {
            if (level.reached(values[i])) list[place++] = {ordered(values[i]), static_cast<uint32_t>(begin + i)};
        }
    }
    sync_block();
    sync_told();
    return all;
}

// The k-th largest of `count` listed scores, two bits at a time.
template <int kThreads, int kBlocks>
__device__ __forceinline__ uint32_t threshold_of_list(int count, int k, SelectBoard<kThreads, kBlocks>& board) {
    constexpr int kEach = kListed / kThreads;
    uint32_t keys[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int place = i * kThreads + static_cast<int>(threadIdx.x);
        keys[i] = place < count ? board.list[place].x : 0;
    }
    uint32_t prefix = 0;
    for (int shift = 30; shift >= 0; shift -= 2) {
        uint64_t reach = 0;  // how many reach the digits 1, 2 and 3, 16 bits each
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            for (uint32_t digit = 1; digit < 4; ++digit) reach += static_cast<uint64_t>(keys[i] >= (prefix | digit << shift)) << 16 * (digit - 1);
        }
        reach = over_block<kThreads>(reach, board.sums, [](uint64_t a, uint64_t b) { return a + b; });
        uint32_t digit = 0;
        while (digit < 3 && static_cast<int>(reach >> 16 * digit & 0xFFFF) >= k) ++digit;
        prefix |= digit << shift;
    }
    return prefix;
}

// Writes what is above the threshold, and as many of its ties as k leaves, in order; -1 behind. kAlone: all of it is this block's.
template <int kThreads, int kBlocks, bool kAlone, class Key, class Index>
__device__ __forceinline__ void write_best(const SelectRows& p, int64_t row, int count, uint32_t threshold, SelectBoard<kThreads, kBlocks>& board,
                                           Key key_of, Index index_of) {
    const int rank = kAlone ? 0 : cluster_rank();
    const Share share = share_of<kThreads>(count);
    uint64_t mine = 0;  // how many are above the threshold, and 2^32 times how many equal it
    for (int i = share.begin; i < share.end; ++i) {
        const uint32_t key = key_of(i);
        mine += key > threshold ? 1 : key == threshold && key > kNothing ? uint64_t{1} << 32 : 0;
    }
    uint64_t everything;
    uint64_t before = sum_before<kThreads>(mine, board.sums, everything);
    if (!kAlone) {
        tell_all(everything, board.totals);
        sync_told();
        everything = 0;
        for (int other = 0; other < kBlocks; ++other) {
            if (other == rank) before += everything;
            everything += board.totals[other];
        }
    }
    const int found = static_cast<int>(everything & 0xFFFFFFFFu), ties = static_cast<int>(everything >> 32);
    const int need = p.k - found < ties ? p.k - found : ties;
    const auto write = [&](int place, int64_t index) {
        if (p.out != nullptr) {
            p.out[row * p.width + place] = static_cast<int>(index);
        } else {
            p.out64[row * p.width + place] = index;
        }
    };
    int above = static_cast<int>(before & 0xFFFFFFFFu), level = static_cast<int>(before >> 32);
    if (mine != 0) {
        for (int i = share.begin; i < share.end; ++i) {
            const uint32_t key = key_of(i);
            const bool tied = key == threshold && key > kNothing;
            if (key > threshold || (tied && level < need)) write(above + (level < need ? level : need), index_of(i));
            above += key > threshold;
            level += tied;
        }
    }
    if (rank == 0) {
        for (int place = found + need + static_cast<int>(threadIdx.x); place < p.width; place += kThreads) write(place, -1);
    }
}

template <int kThreads, int kBlocks>
__global__ void DIX_CLUSTER(kBlocks) __launch_bounds__(kThreads) select_rows(const SelectRows p) {
    auto& board = *reinterpret_cast<SelectBoard<kThreads, kBlocks>*>(shared_memory());
    float* room = reinterpret_cast<float*>(&board + 1);
    const int thread = threadIdx.x, rank = cluster_rank();
    const int64_t row = blockIdx.x / kBlocks;
    const int all = p.count != nullptr && p.count[row] < p.columns ? static_cast<int>(p.count[row]) : p.columns;
    const int size = (all + 4 * kBlocks - 1) / (4 * kBlocks) * 4, begin = rank * size < all ? rank * size : all;
    const int count = begin + size < all ? size : all - begin;
    const float* values = p.scores + row * p.stride + begin;
    const bool fits = size <= p.room;
    if (fits) {
        const bool aligned = reinterpret_cast<uintptr_t>(values) % 16 == 0;
        for (int v = thread; 4 * v < count; v += kThreads) start_vector(room, v, count, values, aligned, -INFINITY);
        commit_copies();
        wait_copies<0>();
        values = room;
    }
    sync_block();
    sync_cluster(false);  // all blocks have begun: their memory may be written
    if (p.lists && fits && p.k <= kListed && p.k <= kGroups * kThreads * kBlocks) {
        Level level;
        int listed = -1;
        if (find_level(values, count, p.k, board, level)) listed = bring(values, begin, count, level, board);
        if (listed >= 0) {
            if (rank != 0) return;
            const uint32_t threshold = threshold_of_list(listed, p.k, board);
            write_best<kThreads, kBlocks, true>(
                p, row, listed, threshold, board, [&](int i) { return board.list[i].x; }, [&](int i) { return static_cast<int64_t>(board.list[i].y); });
            return;
        }
        sync_cluster(false);  // nobody reads bins any more
    }
    const uint32_t threshold = find_threshold(values, count, p.k, board);
    write_best<kThreads, kBlocks, false>(
        p, row, count, threshold, board, [&](int i) { return ordered(values[i]); }, [&](int i) { return static_cast<int64_t>(begin + i); });
}

}  // namespace dix

// threads: of a block, 256 or 512. blocks: that share a row, 1, 2, 4 or 8. Returns a cudaError_t.
extern "C" int dix_select_topk(const dix::SelectRows* p, int threads, int blocks, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (p->num_rows == 0) return cudaSuccess;
    const int grid = p->num_rows * blocks;
#define DIX_SELECT(of_block, of_row)                                                                                             \
    if (threads == of_block && blocks == of_row) {                                                                               \
        const int bytes = sizeof(SelectBoard<of_block, of_row>) + p->room * 4;                                                   \
        const int status = cudaFuncSetAttribute((select_rows<of_block, of_row>), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); \
        if (status != cudaSuccess) return status;                                                                                \
        DIX_LAUNCH_CLUSTERS((select_rows<of_block, of_row>), of_row, grid, of_block, bytes, s, *p);                              \
        return cudaGetLastError();                                                                                               \
    }
    DIX_SELECT(256, 1)
    DIX_SELECT(256, 2)
    DIX_SELECT(256, 4)
    DIX_SELECT(256, 8)
    DIX_SELECT(512, 1)
    DIX_SELECT(512, 2)
    DIX_SELECT(512, 4)
    DIX_SELECT(512, 8)
#undef DIX_SELECT
    return cudaErrorInvalidValue;
}
