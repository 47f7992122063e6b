// Greedy rows and races without filters: one pass over the logits, which stay nowhere. Loads of a few vectors are under way while the ones
// before are worked on, and many blocks fit a multiprocessor.
#pragma once

#include "sample_race.cuh"

namespace dix {

// A block's part of a row in global memory.
struct Stream {
    const float* logits;
    int begin, count, vectors;
    bool aligned;

    __device__ __forceinline__ float4 vector(int v) const {
        if (aligned && 4 * v + 4 <= count) {
            const uint4 bits = load_global16(logits + 4 * v);
            return {value_of(bits.x), value_of(bits.y), value_of(bits.z), value_of(bits.w)};
        }
        return {logit(4 * v), logit(4 * v + 1), logit(4 * v + 2), logit(4 * v + 3)};
    }
    __device__ __forceinline__ float logit(int place) const { return place < count ? logits[place] : -INFINITY; }
};

__device__ __forceinline__ Stream stream_of(const SampleRows& p, int row) {
    const Piece piece = piece_of(p, nullptr);
    const float* logits = p.logits + row * p.row_stride + piece.begin;
    return {logits, piece.begin, piece.count, piece.vectors, reinterpret_cast<uintptr_t>(logits) % 16 == 0};
}

constexpr int kBatch = 4;  // vectors of a thread that are loaded together

template <int kThreads>
__device__ __forceinline__ void load_batch(const Stream& stream, int round, float4 (&batch)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = stream.vector((round + i) * kThreads + static_cast<int>(threadIdx.x));
}

// Races whose ids may all be later than a power of two can say: on chances, once the largest logit is known.
template <int kThreads>
__device__ __forceinline__ Runners run_again(const Stream& stream, uint64_t key, float top, float factor) {
    Runners r;
    for (int first = 0; first < stream.vectors; first += kThreads) {
        const int v = first + static_cast<int>(threadIdx.x);
        const float4 x = stream.vector(v);
        const auto chance = [&](float logit) { return power_of_two((logit - top) * factor); };
        run({chance(x.x), chance(x.y), chance(x.z), chance(x.w)}, stream.begin + 4 * v, v < stream.vectors, key, OfChances{}, r);
    }
    return r;
}

template <int kThreads>
__device__ __forceinline__ void draw_from_stream(const SampleRows& p, int row, Board<kThreads>& board) {
    const Stream stream = stream_of(p, row);
    const bool races = p.modes[row] == kRace;
    const float factor = races ? kLog2OfE / p.temperature[row] : 1.0f;
    const uint64_t key = static_cast<uint64_t>(p.numbers[row]);
    Best mine;
    Runners r;
    float4 next[kBatch];
    load_batch<kThreads>(stream, 0, next);
    for (int round = 0; round * kThreads < stream.vectors; round += kBatch) {
        float4 now[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) now[i] = next[i];
        load_batch<kThreads>(stream, round + kBatch, next);
        const int v = round * kThreads + static_cast<int>(threadIdx.x);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) look_for_best(now[i], stream.begin + 4 * (v + i * kThreads), mine);
        if (!races) continue;
        if (round == 0) first_bar<kThreads>(mine, key, OfLogits{factor}, board, r);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            run(now[i], stream.begin + 4 * (v + i * kThreads), v + i * kThreads < stream.vectors, key, OfLogits{factor}, r);
        }
    }
    sync_cluster(false);  // all blocks have begun: their memory may be written
    const Best best = best_of_row<kThreads>(mine, board);
    int id = best.id;
    if (races && best.logit > -INFINITY && best.logit < INFINITY) {
        if (best.logit * factor <= -Runners::kFar / 2) r = run_again<kThreads>(stream, key, best.logit, factor);
        const auto chance = [&](int place) { return power_of_two((stream.logit(place) - best.logit) * factor); };
        id = finish_race<kThreads>(stream.begin, stream.vectors, key, r, board, chance);
    }
    if (cluster_rank() == 0) write_token(p, row, id, best.logit);
}

}  // namespace dix
