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
    uint64_t buffer[kThreads];
    uint32_t scratch[kThreads / 32];
    uint32_t ties[kPieces];
    int64_t found[3];  // digit, count and weight before it
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

// By the block of rank 0: the bin in which a filter ends, told to all. The counts of all blocks are complete.
template <int kThreads>
__device__ __forceinline__ void find_bin(CutBoard<kThreads>& board, int bins, int64_t count_before, int64_t mass_before, int64_t count_limit,
                                         int64_t most) {
    constexpr int kMine = kBins / kThreads;
    const int first = static_cast<int>(threadIdx.x) * kMine;
    unsigned counts[kMine] = {}, masses[kMine] = {};
    for (int rank = 0; rank < kPieces; ++rank) {
        const unsigned *their_counts = of_rank(board.counts, rank), *their_masses = of_rank(board.masses, rank);
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            counts[i] += their_counts[first + i];
            masses[i] += their_masses[first + i];
        }
    }
    uint64_t both = 0;  // count and weight in one number: neither reaches 2^32
    for (int i = 0; i < kMine; ++i) both += static_cast<uint64_t>(masses[i]) << 32 | counts[i];
    const uint64_t before = sum_before<kThreads>(both, board.buffer);
    int64_t count_here = count_before + static_cast<int64_t>(before & 0xFFFFFFFFu), mass_here = mass_before + static_cast<int64_t>(before >> 32);
    for (int i = 0; i < kMine; ++i) {
        const int64_t count_after = count_here + counts[i], mass_after = mass_here + masses[i];
        const bool open = count_here < count_limit && mass_here <= most;
        if (open && counts[i] != 0 && (count_after >= count_limit || mass_after > most)) {
            set_all<kPieces>(&board.found[0], int64_t{bins - 1 - (first + i)});
            set_all<kPieces>(&board.found[1], count_here);
            set_all<kPieces>(&board.found[2], mass_here);
        }
        count_here = count_after;
        mass_here = mass_after;
    }
}

template <int kThreads>
__device__ __forceinline__ Cut find_cut(const SampleRows& p, int row, const Piece& piece, float per_sum, CutBoard<kThreads>& board) {
    const int thread = threadIdx.x, rank = cluster_rank();
    const int64_t most = p.top_p[row], count_limit = p.top_k[row];
    if (most >= (int64_t{1} << 32) && count_limit >= p.num_ids) return {0, kNoId};
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
            if ((level >> (shift + bits)) != prefix || place >= piece.count) return;
            const int bin = bins - 1 - (level >> shift & (bins - 1));  // the most probable first
            atomic_add_shared(&board.counts[bin], 1u);
            const unsigned weight = fixed_point(value);
            if (weight != 0) atomic_add_shared(&board.masses[bin], weight);
        });
        sync_block();
        sync_told();
        if (rank == 0) find_bin<kThreads>(board, bins, count_before, mass_before, count_limit, most);
        sync_cluster(rank == 0);
        if (board.found[0] < 0) return {0, kNoId};  // in the first round only: everything stays
        prefix = prefix << bits | static_cast<int>(board.found[0]);
        count_before = board.found[1];
        mass_before = board.found[2];
        sync_block();
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
