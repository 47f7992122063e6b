// Where top-k and top-p end a row. In the order of falling probability, ties by id, every filter keeps a prefix: an id stays when fewer than
// top_k ids are before it and their weights do not exceed top_p. Three rounds find the level at which that ends, digit by digit, from
// counts and weights of all ids with the digits found so far; ties at that level are counted off.
#pragma once

#include "sample_rows.cuh"

namespace dix {

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;  // 31 bits of a positive number: digits of 11, 11 and 9 bits

template <int kThreads>
struct alignas(16) CutBoard {
    unsigned counts[kBins], masses[kBins];
    uint64_t sums[kBins];  // of all blocks, at rank 0
    uint64_t buffer[kThreads / 32];
    uint32_t scratch[kThreads / 32];
    int level_scratch[kThreads / 32];
    uint32_t ties[kPieces];
    int64_t found[4];  // digit, count and weight before it, how many have it
    int cut_id;
};

struct Cut {
    int level, last_id;  // bits of the least probability that stays, and the last id that stays at it
};

template <int kThreads, class Use>
__device__ __forceinline__ void for_exponentials(const Piece& piece, Use use) {
    for (int v = threadIdx.x; v < piece.vectors; v += kThreads) {
        const float4 e = piece.vector(v);
        use(4 * v, e.x);
        use(4 * v + 1, e.y);
        use(4 * v + 2, e.z);
        use(4 * v + 3, e.w);
    }
}

// Adds up the bins of all blocks, an eighth of them by each, in the memory of the first. Neighbours read neighbours: other orders meet in banks.
template <int kThreads>
__device__ __forceinline__ void add_up(CutBoard<kThreads>& board) {
    constexpr int kSlice = kBins / kPieces;
    for (int bin = cluster_rank() * kSlice + static_cast<int>(threadIdx.x); bin < (cluster_rank() + 1) * kSlice; bin += kThreads) {
        unsigned count = 0, mass = 0;
#pragma unroll
        for (int rank = 0; rank < kPieces; ++rank) {
            count += *of_rank(&board.counts[bin], rank);
            mass += *of_rank(&board.masses[bin], rank);
        }
        *of_rank(&board.sums[bin], 0) = static_cast<uint64_t>(mass) << 32 | count;  // neither reaches 2^32
    }
}

// By the block of rank 0, when all is added up: the bin in which a filter ends, told to all.
template <int kThreads>
__device__ __forceinline__ void find_bin(CutBoard<kThreads>& board, int bins, int64_t count_before, int64_t mass_before, int64_t count_limit,
                                         int64_t most) {
    constexpr int kMine = kBins / kThreads;
    const int first = static_cast<int>(threadIdx.x) * kMine;
    uint64_t both = 0;
    for (int i = 0; i < kMine; ++i) both += board.sums[first + i];
    const uint64_t before = sum_before<kThreads>(both, board.buffer);
    int64_t count_here = count_before + static_cast<int64_t>(before & 0xFFFFFFFFu), mass_here = mass_before + static_cast<int64_t>(before >> 32);
    for (int i = 0; i < kMine; ++i) {
        const int64_t count = board.sums[first + i] & 0xFFFFFFFFu, mass = static_cast<int64_t>(board.sums[first + i] >> 32);
        const bool open = count_here < count_limit && mass_here <= most;
        if (open && count != 0 && (count_here + count >= count_limit || mass_here + mass > most)) {
            set_all<kPieces>(&board.found[0], int64_t{bins - 1 - (first + i)});
            set_all<kPieces>(&board.found[1], count_here);
            set_all<kPieces>(&board.found[2], mass_here);
            set_all<kPieces>(&board.found[3], count);
        }
        count_here += count;
        mass_here += mass;
    }
}

template <int kThreads>
__device__ __forceinline__ Cut find_cut(const SampleRows& p, int row, const Piece& piece, float per_sum, CutBoard<kThreads>& board) {
    const int thread = threadIdx.x, rank = cluster_rank();
    const int64_t most = p.top_p[row], count_limit = p.top_k[row];
    if (most >= kNoLimit && count_limit >= p.num_ids) return {0, kNoId};
    // Every thread has an id of at least `least`: with top_k of them or more, none below it stays, and none below it needs to be counted.
    int largest = 0;
    for_exponentials<kThreads>(piece, [&](int, float e) {
        const int level = bits_of(e * per_sum);
        largest = level > largest ? level : largest;
    });
    const int common = over_block<kThreads>(largest, board.level_scratch, [](int a, int b) { return a < b ? a : b; });
    const int least = count_limit <= kThreads ? common : 0;
    int prefix = 0;
    int64_t count_before = 0, mass_before = 0;
    for (int shift = 20; shift >= 0; shift = shift == 20 ? 9 : shift - 9) {
        const int bits = shift == 0 ? 9 : kDigitBits, bins = 1 << bits;
        for (int bin = thread; bin < kBins; bin += kThreads) board.counts[bin] = board.masses[bin] = 0;
        if (thread == 0) board.found[0] = -1;
        sync_block();
        for_exponentials<kThreads>(piece, [&](int place, float e) {
            const float value = e * per_sum;
            const int level = bits_of(value);
            if (level >> shift < least >> shift || (level >> (shift + bits)) != prefix || place >= piece.count) return;
            const int bin = bins - 1 - (level >> shift & (bins - 1));  // the most probable first
            atomic_add_shared(&board.counts[bin], 1u);
            const unsigned weight = fixed_point(value);
            if (weight != 0) atomic_add_shared(&board.masses[bin], weight);
        });
        sync_block();
        sync_told();
        add_up(board);
        sync_cluster(true);
        if (rank == 0) find_bin<kThreads>(board, bins, count_before, mass_before, count_limit, most);
        sync_cluster(rank == 0);
        if (board.found[0] < 0) return {0, kNoId};  // in the first round only: everything stays
        prefix = prefix << bits | static_cast<int>(board.found[0]);
        count_before = board.found[1];
        mass_before = board.found[2];
        const bool alone = board.found[3] == 1;
        sync_block();
        if (alone) return {(prefix << shift) - 1, kNoId};  // the id in which the filter ends has these digits for itself, and stays
    }
    // How many ids of exactly this probability stay: those with fewer than top_k before them and at most top_p of weight.
    const int64_t weight = fixed_point(value_of(prefix));
    int64_t stay = count_limit - count_before;
    if (weight > 0 && (most - mass_before) / weight + 1 < stay) stay = (most - mass_before) / weight + 1;
    const auto tied = [&](int place) { return bits_of(piece.values[place] * per_sum) == prefix; };
    const Share share = share_of<kThreads>(piece.count);
    uint32_t ties = 0;
    for (int place = share.begin; place < share.end; ++place) ties += tied(place);
    if (thread == 0) board.cut_id = kNoId;
    tell_all(over_block<kThreads>(ties, board.scratch, [](uint32_t a, uint32_t b) { return a + b; }), board.ties);
    sync_told();
    int64_t before = 0;
    for (int other = 0; other < rank; ++other) before += board.ties[other];
    if (before < stay && stay <= before + board.ties[rank]) {
        before += static_cast<int64_t>(sum_before<kThreads>(uint64_t{ties}, board.buffer));
        if (before < stay && stay <= before + ties) {
            int place = share.begin;
            for (; place < share.end; ++place) {
                if (tied(place) && ++before == stay) break;
            }
            set_all<kPieces>(&board.cut_id, piece.begin + place);
        }
    }
    sync_cluster(true);
    return {prefix, board.cut_id};
}

}  // namespace dix
