// A race: the id whose exponential waiting time ends first (engine/draws.py: race). Times are compared by their powers of two, as lines that
// fall with the logit, so that neither the largest logit nor the sum of a row has to be known while it is run, and a row need not be kept. Few
// ids come near the winner; among those the exact times decide.
#pragma once

#include "sample_rows.cuh"

#include <cstring>

namespace dix {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr float kLog2OfE = 1.4426950408889634f;

// SplitMix64's number, of which the upper 53 bits count. start: key + (id + 1) * kGolden.
__device__ __forceinline__ uint64_t mixed(uint64_t start) {
    uint64_t x = (start ^ (start >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
// Its first 31 bits, and a last one that is not meant: all that most ids need.
__device__ __forceinline__ uint32_t first_bits(uint64_t start) {
    const uint32_t low = static_cast<uint32_t>(start), high = static_cast<uint32_t>(start >> 32);
    const uint32_t a = low ^ shift_right(low, high, 30), b = high ^ (high >> 30);
    const uint32_t c = a * 0x1CE4E5B9u, d = a * 0xBF58476Du + (b * 0x1CE4E5B9u + multiply_high(a, 0x1CE4E5B9u));
    const uint32_t e = c ^ shift_right(c, d, 27), f = d ^ (d >> 27);
    return e * 0x94D049BBu + (f * 0x133111EBu + multiply_high(e, 0x133111EBu));
}
__device__ __forceinline__ uint64_t number_of(uint64_t key, int id) { return mixed(key + static_cast<uint64_t>(id + 1) * kGolden); }

// -log(1 - u) of a number, within a relative 2e-4. Behind 0.99 fp32 has too few digits for it: what it is at least.
constexpr float kLateTime = 4.6f;
__device__ __forceinline__ float rough_time(uint64_t number) {
    const float u = (static_cast<float>(number >> 11) + 0.5f) * 1.1102230246251565e-16f;  // 2^-53
    if (u < 0.05f) return u * (1.0f + u * (0.5f + u * 0.33333f));
    return u < 0.99f ? -quick_log(1.0f - u) : kLateTime;
}

__device__ __forceinline__ double exact_time(uint64_t number, float chance) {
    return -log1p(-((static_cast<double>(number >> 11) + 0.5) * 0x1p-53)) / static_cast<double>(chance);
}

// What a race is run with: the row's logits, or chances that filters have left.
struct OfLogits {
    float factor;  // log2(e) / temperature
    __device__ __forceinline__ float reach(float x, float gate) const { return power_of_two(fmaf(x, factor, gate)); }
    __device__ __forceinline__ float log_time(float x, float time) const { return quick_log(time) * kLog2OfE - x * factor; }
};
struct OfChances {
    __device__ __forceinline__ float reach(float e, float gate) const { return e * power_of_two(fminf(gate, 127.0f)); }  // 0 stays 0
    __device__ __forceinline__ float log_time(float e, float time) const { return quick_log(time / e) * kLog2OfE; }
};

// A thread knows log2 of its least time, which id has it, and how small another one of its own may be.
struct Runners {
    // Finite, so that a logit of -inf is dismissed from the beginning. Where all ids may be later a race has to be run on chances.
    static constexpr float kFar = 1e30f;
    float bar = kFar;   // the block has an id whose time is at most this
    float gate = kFar;  // the same with room for rounding
    float first = INFINITY, second = INFINITY;
    int first_id = kNoId;

    // Twice what a rough time may be wrong by, and what a sum of large numbers rounds.
    static __device__ __forceinline__ float with_room(float time) { return time + fminf(1e-3f + fabsf(time) * 4.8e-7f, kFar); }
    __device__ __forceinline__ void lower(float to) {
        bar = to;
        gate = with_room(to);
    }
};

// The bar before anybody has run: the least time of the ids that the threads like best.
template <int kThreads, class Of>
__device__ __forceinline__ void first_bar(const Best& mine, uint64_t key, Of of, Board<kThreads>& board, Runners& r) {
    float time = Runners::kFar;
    if (mine.id != kNoId) {
        const float rough = rough_time(number_of(key, mine.id));
        if (rough < kLateTime) time = fminf(of.log_time(mine.logit, rough), Runners::kFar);
    }
    r.lower(over_block<kThreads>(time, board.sum_scratch, [](float a, float b) { return fminf(a, b); }));
}

// Nearly all ids are dismissed by one comparison: u <= -log(1 - u), so that a time cannot be below the bar when u is not below what the bar
// leaves to the id. Of u the first 23 bits are taken, as the fraction of a number from 1 to 2. Whoever may pass takes the logarithm. All lanes of
// a warp come; id: of the first of four, inside: whether they exist.
template <class Of>
__device__ __forceinline__ void run(const float4& x, int id, bool inside, uint64_t key, Of of, Runners& r) {
    const float four[4] = {x.x, x.y, x.z, x.w};
    const uint64_t start = key + static_cast<uint64_t>(static_cast<uint32_t>(id + 1)) * kGolden;
    bool may[4], any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        may[i] = !(value_of(static_cast<int>(shift_right(first_bits(start + i * kGolden), 0x7Fu, 9))) > 1.0f + of.reach(four[i], r.gate));
        any |= may[i];
    }
    if (!any_lane(any && inside)) return;
    float bar = r.bar;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (!may[i] || !inside) continue;
        const float rough = rough_time(mixed(start + i * kGolden)), time = of.log_time(four[i], rough);
        if (rough < kLateTime) bar = fminf(bar, time);
        if (time < r.first) {
            r.second = r.first;
            r.first = time;
            r.first_id = id + i;
        } else {
            r.second = fminf(r.second, time);
        }
    }
    for (int mask = 16; mask > 0; mask /= 2) bar = fminf(bar, shuffle_xor(bar, mask));
    r.lower(bar);
}

// The id of the least time, of all blocks: `id` has `time` in this thread. Ties go to the lower id.
template <int kThreads>
__device__ __forceinline__ int first_of_block(double time, int id, Board<kThreads>& board, uint64_t& least) {
    uint64_t bits;
    std::memcpy(&bits, &time, sizeof bits);
    least = over_block<kThreads>(bits, board.time_scratch, [](uint64_t a, uint64_t b) { return a < b ? a : b; });
    return over_block<kThreads>(bits == least ? id : kNoId, board.id_scratch, [](int a, int b) { return a < b ? a : b; });
}

// The exact race among the ids that the rough one leaves; mostly that is one thread's first. The block's ids begin at `begin`, in so many
// vectors; chance(place) is the one of an id among them, 0 where there is none.
template <int kThreads, class Chance>
__device__ __forceinline__ int finish_race(int begin, int vectors, uint64_t key, const Runners& r, Board<kThreads>& board, Chance chance) {
    const float limit = Runners::with_room(over_block<kThreads>(r.bar, board.sum_scratch, [](float a, float b) { return fminf(a, b); }));
    double best = INFINITY;
    int id = kNoId;
    const auto enter = [&](int here) {
        const float of_it = chance(here - begin);
        if (!(of_it > 0.0f)) return;
        const double time = exact_time(number_of(key, here), of_it);
        if (time < best) {
            best = time;
            id = here;
        }
    };
    if (r.first <= limit) {
        if (r.second > limit) {
            enter(r.first_id);
        } else {
            for (int v = threadIdx.x; v < vectors; v += kThreads) {
                for (int i = 0; i < 4; ++i) enter(begin + 4 * v + i);
            }
        }
    }
    uint64_t least;
    const int winner = first_of_block<kThreads>(best, id, board, least);
    tell_all(least, board.times);
    tell_all(winner, board.time_ids);
    sync_told();
    const uint64_t first = over_slots(board.times, [](uint64_t a, uint64_t b) { return a < b ? a : b; });
    int all = kNoId;
    for (int rank = kPieces - 1; rank >= 0; --rank) {
        if (board.times[rank] == first) all = board.time_ids[rank];
    }
    return all;
}

}  // namespace dix
