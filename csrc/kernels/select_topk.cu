// The k best scores of each row, ascending by index; ties go to the lower index, -inf is never picked.
//
// A cluster of blocks shares a row, in its shared memory if it fits. Two or three rounds over the digits of the scores find the k-th best:
// every block counts how many of its scores have the digits found so far and which one comes next, the first block adds the counts up.
// What is above the k-th best, and as many of its ties as are needed, is then written in order. How a row is divided changes no result.
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
    int room;  // scores that a block's shared memory holds
};

constexpr int kDigit = 11;
constexpr int kDigitBins = 1 << kDigit;  // digits of 11, 11 and 10 bits
constexpr uint32_t kNothing = 0x007FFFFF;  // -inf in order: only what is above it exists

template <int kThreads, int kBlocks>
struct alignas(16) SelectBoard {
    unsigned bins[kDigitBins];
    uint32_t scratch[kThreads / 32];
    uint64_t buffer[kThreads];
    uint64_t totals[kBlocks];
    int found[3];  // digit or -1, how many are before it, how many have it
};


// By the block of rank 0: the bin of the k-th best, told to all. The bins of all blocks are complete.
template <int kThreads, int kBlocks>
__device__ __forceinline__ void find_digit(SelectBoard<kThreads, kBlocks>& board, int bins, int before, int k) {
    constexpr int kMine = kDigitBins / kThreads;
    static_assert(kMine % 4 == 0);
    const int first = static_cast<int>(threadIdx.x) * kMine;
    unsigned counts[kMine] = {};
#pragma unroll
    for (int rank = 0; rank < kBlocks; ++rank) {
        const unsigned* theirs = of_rank(board.bins, rank) + first;
#pragma unroll
        for (int i = 0; i < kMine; i += 4) {
            const uint4 read = load_shared16(theirs + i);
            counts[i] += read.x;
            counts[i + 1] += read.y;
            counts[i + 2] += read.z;
            counts[i + 3] += read.w;
        }
    }
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) mine += counts[i];
    int here = before + static_cast<int>(sum_before<kThreads>(mine, board.buffer));
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
    if (size <= p.room) {
        const bool aligned = reinterpret_cast<uintptr_t>(values) % 16 == 0;
        for (int v = thread; 4 * v < count; v += kThreads) start_vector(room, v, count, values, aligned, -INFINITY);
        commit_copies();
        wait_copies<0>();
        values = room;
    }
    sync_block();
    sync_cluster(false);  // all blocks have begun: their memory may be written
    const uint32_t threshold = find_threshold(values, count, p.k, board);

    const Share share = share_of<kThreads>(count);
    uint64_t mine = 0;  // how many are above the threshold, and 2^32 times how many equal it
    for (int i = share.begin; i < share.end; ++i) {
        const uint32_t key = ordered(values[i]);
        mine += key > threshold ? 1 : key == threshold && key > kNothing ? uint64_t{1} << 32 : 0;
    }
    uint64_t before = sum_before<kThreads>(mine, board.buffer);
    const uint64_t total = board.buffer[kThreads - 1];
    tell_all(total, board.totals);
    sync_told();
    uint64_t everything = 0;
    for (int other = 0; other < kBlocks; ++other) {
        if (other == rank) before += everything;
        everything += board.totals[other];
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
            const uint32_t key = ordered(values[i]);
            const bool tied = key == threshold && key > kNothing;
            if (key > threshold || (tied && level < need)) write(above + (level < need ? level : need), begin + i);
            above += key > threshold;
            level += tied;
        }
    }
    if (rank == 0) {
        for (int place = found + need + thread; place < p.width; place += kThreads) write(place, -1);
    }
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
