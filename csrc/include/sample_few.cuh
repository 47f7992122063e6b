// The short way through filters, for rows of which few ids stay: the most probable ones are collected by one block, which compares each with
// each. Every thread knows the largest of its ids; a level that k of those reach has k ids or more above it, and hardly more than twice as many.
#pragma once

#include "sample_race.cuh"

namespace dix {

constexpr int kFew = 512;        // ids that are collected at most
constexpr int kFewWanted = 192;  // of a row without a limit to their number: how many are tried
constexpr int kSteps = 512;      // levels below the most probable one, eighths of a power of two apart
constexpr int kStepBits = 20;

struct alignas(16) FewBoard {
    unsigned counts[kSteps];
    uint64_t keys[kFew];  // level, and the lower ids first: larger before smaller is the filters' order
    uint32_t weights[kFew];
    int stays[kFew], sums[32];
    int count, step, kept, found;
    int open;  // more may stay than were collected
};

__device__ __forceinline__ uint64_t few_key(int level, int id) { return static_cast<uint64_t>(level) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id)); }
__device__ __forceinline__ float few_chance(uint64_t key) { return value_of(static_cast<int>(key >> 32)); }

// The lowest step that `wanted` threads of the cluster have something on or above; the last one if there are fewer.
template <int kThreads>
__device__ __forceinline__ int step_of(FewBoard& few, int below_top, int wanted) {
    const int thread = threadIdx.x;
    for (int step = thread; step < kSteps; step += kThreads) few.counts[step] = 0;
    if (thread == 0) few.step = kSteps - 1;
    sync_block();
    const int mine = below_top >> kStepBits;
    if (mine < kSteps) atomic_add_shared(&few.counts[mine], 1u);
    sync_block();
    sync_told();
    constexpr int kEach = kSteps / kThreads > 0 ? kSteps / kThreads : 1;
    int counts[kEach] = {};
    int sum = 0;
    for (int i = 0; i < kEach; ++i) {
        for (int rank = 0; rank < kPieces; ++rank) counts[i] += static_cast<int>(*of_rank(&few.counts[thread * kEach + i], rank));
        sum += counts[i];
    }
    int before = sum_before<kThreads>(sum, few.sums);
    for (int i = 0; i < kEach; ++i) {
        if (before < wanted && before + counts[i] >= wanted) few.step = thread * kEach + i;
        before += counts[i];
    }
    sync_block();
    return few.step;
}

// Brings the ids from `least` on to the first block. False in all blocks when there are too many.
template <int kThreads>
__device__ __forceinline__ bool collect(const Piece& piece, float per_sum, int least, FewBoard& few) {
    for (int v = threadIdx.x; v < piece.vectors; v += kThreads) {
        const float4 e = piece.vector(v);
        const float four[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int level = bits_of(four[i] * per_sum);
            if (level < least) continue;
            const int place = atomic_add_shared(of_rank(&few.count, 0), 1);
            if (place >= kFew) continue;
            *of_rank(&few.keys[place], 0) = few_key(level, piece.begin + 4 * v + i);
        }
    }
    sync_block();
    sync_told();
    const bool fits = *of_rank(&few.count, 0) <= kFew;
    if (!fits) sync_cluster(false);  // all blocks have read it: the memory may serve otherwise
    return fits;
}

// By the first block: takes the filtered ids out (weight 0, and level 0), as the filters' order of falling probability, ties by id, has it.
template <int kThreads>
__device__ __forceinline__ void filter_few(FewBoard& few, int64_t most, int64_t count_limit, float least) {
    const int count = few.count;
    for (int i = threadIdx.x; i < count; i += kThreads) few.weights[i] = fixed_point(few_chance(few.keys[i]));
    if (threadIdx.x == 0) {
        few.kept = 0;
        few.found = kNoId;
    }
    sync_block();
    int stay = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const uint64_t key = few.keys[i];
        int before = 0;
        uint32_t mass = 0;  // a row's weights add up to less than 2^32
#pragma unroll 8
        for (int j = 0; j < count; ++j) {
            const bool first = few.keys[j] > key;
            before += first;
            mass += first ? few.weights[j] : 0;
        }
        few.stays[i] = before < count_limit && mass <= most && few_chance(key) >= least;
        stay += few.stays[i];
    }
    sync_block();
    for (int i = threadIdx.x; i < count; i += kThreads) {
        if (few.stays[i] != 0) continue;
        few.weights[i] = 0;
        few.keys[i] &= 0xFFFFFFFFu;
    }
    if (stay > 0) atomic_add_shared(&few.kept, stay);
    sync_block();
}

// The id on whose weight the number falls, weights in the order of ids.
template <int kThreads>
__device__ __forceinline__ int invert_few(FewBoard& few, int64_t number) {
    const int count = few.count;
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const uint32_t order = static_cast<uint32_t>(few.keys[i]);
        uint32_t before = 0, total = 0;
#pragma unroll 8
        for (int j = 0; j < count; ++j) {
            const uint32_t weight = few.weights[j];
            before += static_cast<uint32_t>(few.keys[j]) > order ? weight : 0;
            total += weight;
        }
        const int64_t left = share_of_total(number, total);
        if (before <= left && left < static_cast<int64_t>(before) + few.weights[i]) few.found = static_cast<int>(0xFFFFFFFFu - order);
    }
    sync_block();
    return few.found;
}

template <int kThreads>
__device__ __forceinline__ int race_few(const FewBoard& few, uint64_t key, Board<kThreads>& board) {
    double best = INFINITY;
    int id = kNoId;
    for (int i = threadIdx.x; i < few.count; i += kThreads) {
        const float chance = few_chance(few.keys[i]);
        if (!(chance > 0.0f)) continue;
        const int here = static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(few.keys[i]));
        const double time = exact_time(number_of(key, here), chance);
        if (time < best || (time == best && here < id)) {
            best = time;
            id = here;
        }
    }
    uint64_t least;
    return first_of_block<kThreads>(best, id, board, least);
}

// Whether the row's token comes from few ids; then `id` is it in the first block, kNoId in the others. level: of the thread's most probable id.
template <int kThreads>
__device__ __forceinline__ bool draw_of_few(const SampleRows& p, int row, const Piece& piece, int level, float per_sum, Board<kThreads>& board,
                                            FewBoard& few, int& id) {
    const int64_t most = p.top_p[row], count_limit = p.top_k[row];
    const float least = p.min_p[row] * per_sum;
    const int top = bits_of(per_sum), wanted = count_limit < kFewWanted ? static_cast<int>(count_limit) : kFewWanted;
    const int step = step_of<kThreads>(few, top - level, wanted);
    int bound = step == kSteps - 1 ? 1 : top - ((step + 1) << kStepBits) + 1;
    const bool by_least = bits_of(least) > bound;
    if (by_least) bound = bits_of(least);
    if (!collect<kThreads>(piece, per_sum, bound, few)) return false;
    // Where no others can stay the other blocks are done; the first one waits at its end until they have read what they read of it.
    const bool sure = count_limit <= wanted || by_least || bound == 1;
    if (cluster_rank() == 0) {
        filter_few<kThreads>(few, most, count_limit, least);
        const bool ended = sure || few.kept < few.count;  // those that stay end before those that were collected do
        if (!sure && threadIdx.x == 0) set_all<kPieces>(&few.open, ended ? 0 : 1);
        if (ended) {
            id = p.modes[row] == kRace ? race_few<kThreads>(few, static_cast<uint64_t>(p.numbers[row]), board)
                                       : invert_few<kThreads>(few, p.numbers[row]);
        }
    } else if (sure) {
        return true;
    }
    sync_cluster(cluster_rank() == 0);
    return sure || few.open == 0;
}

}  // namespace dix
