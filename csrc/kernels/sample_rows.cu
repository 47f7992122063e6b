// One token per row of logits without sorting and without the host: the largest logit, or a draw from the tempered distribution with
// given random numbers (engine/draws.py is the definition).
//
// One launch, one read. A cluster of thread blocks keeps a row in its shared memory: first the logits, from which it takes the maximum, then
// their exponentials, of which it takes the sum. Filters drop ids (sample_cuts.cuh); then the ids race, or their fixed-point weights are
// added up to where the random number falls. What the blocks find is combined in their order, so a token depends on its row alone.
#include "sample_cuts.cuh"

#include <cstring>

namespace dix {

// What blocks of a cluster tell each other, and room for sums over a block.
template <int kThreads>
struct alignas(16) Board {
    uint64_t tops[kPieces], top_scratch[kThreads / 32];
    uint64_t times[kPieces], time_scratch[kThreads / 32];  // bits of positive doubles are in their order
    float sums[kPieces], sum_scratch[kThreads / 32];
    int time_ids[kPieces], id_scratch[kThreads / 32];
    uint32_t weights[kPieces], weight_scratch[kThreads / 32];
    uint32_t buffer[kThreads];
    int64_t left;
    int share, found;
};

template <int kThreads>
__device__ __forceinline__ uint64_t largest(const Piece& piece) {
    float top = -INFINITY;
    int id = kNoId;
    const auto look = [&](int begin, int end) {
        for (int v = begin + static_cast<int>(threadIdx.x); v < end; v += kThreads) {
            const float4 x = piece.vector(v);
            const float most = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), sum = (x.x + x.y) + (x.z + x.w);
            if (!(most > top) && sum == sum) continue;  // a NaN shows in the sum
            const float four[4] = {x.x, x.y, x.z, x.w};
            for (int i = 0; i < 4; ++i) {
                const int here = piece.begin + 4 * v + i;
                if (above(four[i], here, top, id)) {
                    top = four[i];
                    id = here;
                }
            }
        }
    };
    const int first = first_vectors<kThreads>(piece);
    wait_copies<1>();
    look(0, first);
    wait_copies<0>();
    look(first, piece.vectors);
    return rank_of(top, id);
}

// exp((logit - top) / temperature) in place of the logits; their sum. By powers of two: what that costs in digits is what a rounding of the
// logits costs as well.
template <int kThreads>
__device__ __forceinline__ float exponentials(const Piece& piece, float top, float temperature) {
    const float factor = 1.4426950408889634f / temperature;
    float sum = 0.0f;
    for (int v = threadIdx.x; v < piece.vectors; v += kThreads) {
        float4& x = piece.vector(v);
        float4 e;
        e.x = power_of_two((x.x - top) * factor);
        e.y = power_of_two((x.y - top) * factor);
        e.z = power_of_two((x.z - top) * factor);
        e.w = power_of_two((x.w - top) * factor);
        x = e;
        sum += (e.x + e.y) + (e.z + e.w);
    }
    return sum;
}

template <int kThreads>
__device__ __forceinline__ void drop(const Piece& piece, float per_sum, Cut cut, float least) {
    const auto kept = [&](int id, float e) {
        const float p = e * per_sum;
        const int bits = bits_of(p);
        return (bits > cut.level || (bits == cut.level && id <= cut.last_id)) && p >= least ? e : 0.0f;
    };
    for (int v = threadIdx.x; v < piece.vectors; v += kThreads) {
        const float4 e = piece.vector(v);
        const int id = piece.begin + 4 * v;
        piece.vector(v) = {kept(id, e.x), kept(id + 1, e.y), kept(id + 2, e.z), kept(id + 3, e.w)};
    }
}

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// SplitMix64's number, of which the upper 53 bits count. start: key + (id + 1) * kGolden.
__device__ __forceinline__ uint64_t mixed(uint64_t start) {
    uint64_t x = (start ^ (start >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

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

// The ids of a block that may win a race. Times are in units of the row's sum; a thread knows its least, which id has it, and how small
// another one of its own may be.
struct Runners {
    float bar;  // the block has an id whose time is at most this
    float first, second;
    int first_id;
};

// Nearly all ids are dismissed by one comparison: u <= -log(1 - u), so that a time cannot be below the bar when u / chance is not. Lanes of a
// warp share their bar; whoever may pass takes the logarithm.
template <int kThreads>
__device__ __forceinline__ Runners run(const Piece& piece, uint64_t key) {
    constexpr float kUnit = 0.999f * 2.3283064365386963e-10f;  // 2^-32, and room for rounding
    Runners r = {INFINITY, INFINITY, INFINITY, kNoId};
    const int rounds = (piece.vectors + kThreads - 1) / kThreads;
    for (int round = 0; round < rounds; ++round) {
        const int v = round * kThreads + static_cast<int>(threadIdx.x);
        float4 e = {0.0f, 0.0f, 0.0f, 0.0f};
        if (v < piece.vectors) e = piece.vector(v);
        const float chances[4] = {e.x, e.y, e.z, e.w};
        const uint64_t start = key + static_cast<uint64_t>(piece.begin + 4 * v + 1) * kGolden;
        bool may[4], any = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t high = static_cast<uint32_t>(mixed(start + i * kGolden) >> 32);
            // One less than the number: its last bit is left to be computed when it matters.
            may[i] = fmaf(static_cast<float>(high), kUnit, -kUnit) < r.bar * chances[i];
            any |= may[i];
        }
        if (!any_lane(any)) continue;
        float bar = r.bar;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!may[i]) continue;
            const float rough = rough_time(mixed(start + i * kGolden)), time = rough / chances[i];
            if (rough < kLateTime) bar = fminf(bar, time);
            if (time < r.first) {
                r.second = r.first;
                r.first = time;
                r.first_id = piece.begin + 4 * v + i;
            } else {
                r.second = fminf(r.second, time);
            }
        }
        for (int mask = 16; mask > 0; mask /= 2) bar = fminf(bar, shuffle_xor(bar, mask));
        r.bar = bar;
    }
    return r;
}

// The exact race among the ids that the rough one leaves; mostly that is one thread's first.
template <int kThreads>
__device__ __forceinline__ int race(const Piece& piece, uint64_t key, float per_sum, Board<kThreads>& board) {
    const Runners r = run<kThreads>(piece, key);
    const float limit = over_block<kThreads>(r.bar, board.sum_scratch, [](float a, float b) { return fminf(a, b); }) * 1.0005f;
    double best = INFINITY;
    int id = kNoId;
    const auto enter = [&](int here) {
        const float chance = piece.values[here - piece.begin] * per_sum;
        if (!(chance > 0.0f)) return;
        const double time = exact_time(mixed(key + static_cast<uint64_t>(here + 1) * kGolden), chance);
        if (time < best) {
            best = time;
            id = here;
        }
    };
    if (r.first <= limit) {
        if (r.second > limit) {
            enter(r.first_id);
        } else {
            for (int v = threadIdx.x; v < piece.vectors; v += kThreads) {
                for (int i = 0; i < 4; ++i) enter(piece.begin + 4 * v + i);
            }
        }
    }
    const auto earlier = [](uint64_t a, uint64_t b) { return a < b ? a : b; };
    const auto lower = [](int a, int b) { return a < b ? a : b; };
    uint64_t bits;
    std::memcpy(&bits, &best, sizeof bits);
    const uint64_t least = over_block<kThreads>(bits, board.time_scratch, earlier);
    const int winner = over_block<kThreads>(bits == least ? id : kNoId, board.id_scratch, lower);
    tell_all(least, board.times);
    tell_all(winner, board.time_ids);
    sync_told();
    const uint64_t first = over_slots(board.times, earlier);
    int all = kNoId;
    for (int rank = kPieces - 1; rank >= 0; --rank) {
        if (board.times[rank] == first) all = board.time_ids[rank];
    }
    return all;
}

// The id on whose weight the number falls; kNoId in blocks that do not hold it.
template <int kThreads>
__device__ __forceinline__ int invert(const Piece& piece, int64_t number, float per_sum, Board<kThreads>& board) {
    uint32_t sum = 0;
    for (int v = threadIdx.x; v < piece.vectors; v += kThreads) {
        const float4 e = piece.vector(v);
        sum += (fixed_point(e.x * per_sum) + fixed_point(e.y * per_sum)) + (fixed_point(e.z * per_sum) + fixed_point(e.w * per_sum));
    }
    tell_all(over_block<kThreads>(sum, board.weight_scratch, [](uint32_t a, uint32_t b) { return a + b; }), board.weights);
    sync_told();
    int64_t total = 0;
    for (int rank = 0; rank < kPieces; ++rank) total += board.weights[rank];
    // floor(number / 2^53 * total) without overflow: 31 high bits and 22 low bits of the number.
    int64_t left = ((number >> 22) * total + (((number & ((1 << 22) - 1)) * total) >> 22)) >> 31;
    int owner = 0;
    while (owner < kPieces - 1 && left >= board.weights[owner]) left -= board.weights[owner++];
    if (owner != cluster_rank()) return kNoId;
    const Share share = share_of<kThreads>(piece.count);
    const auto weight = [&](int place) { return fixed_point(piece.values[place] * per_sum); };
    uint32_t mine = 0;
    for (int place = share.begin; place < share.end; ++place) mine += weight(place);
    if (threadIdx.x == 0) {
        board.found = piece.begin + piece.count - 1;
        board.share = 0;
        board.left = -1;
    }
    const int64_t before = sum_before<kThreads>(mine, board.buffer);
    // The share in which it falls is looked through by all threads at once: it is not longer than they are many.
    if (before <= left && left < before + mine) {
        board.share = share.begin;
        board.left = left - before;
    }
    sync_block();
    const int place = board.share + static_cast<int>(threadIdx.x);
    const bool inside = static_cast<int>(threadIdx.x) < share_size<kThreads>(piece.count) && place < piece.count;
    const uint32_t own = inside ? weight(place) : 0;
    const int64_t passed = sum_before<kThreads>(own, board.buffer);
    if (passed <= board.left && board.left < passed + own) board.found = piece.begin + place;
    sync_block();
    return board.found;
}

template <int kThreads>
__global__ void DIX_CLUSTER(kPieces) __launch_bounds__(kThreads) draw_rows(const SampleRows p) {
    auto& board = *reinterpret_cast<Board<kThreads>*>(shared_memory());
    auto& cuts = *reinterpret_cast<CutBoard<kThreads>*>(&board + 1);
    float* values = p.top_p != nullptr ? reinterpret_cast<float*>(&cuts + 1) : reinterpret_cast<float*>(&cuts);
    const int row = blockIdx.x / kPieces, rank = cluster_rank(), mode = p.modes[row];
    const Piece piece = piece_of(p, values);
    start_loads<kThreads>(piece, p.logits + row * p.row_stride);
    sync_cluster(false);  // all blocks have begun: their memory may be written
    const auto better = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
    tell_all(over_block<kThreads>(largest<kThreads>(piece), board.top_scratch, better), board.tops);
    sync_told();
    const uint64_t best = over_slots(board.tops, better);
    const float top = logit_of(best);
    int id = id_of(best);
    bool writes = rank == 0;
    if (mode != kGreedy && top > -INFINITY && top < INFINITY) {
        const float temperature = p.temperature[row];
        const auto plus = [](float a, float b) { return a + b; };
        tell_all(over_block<kThreads>(exponentials<kThreads>(piece, top, temperature), board.sum_scratch, plus), board.sums);
        sync_told();
        const float per_sum = 1.0f / over_slots(board.sums, plus);
        if (p.top_p != nullptr) {
            const Cut cut = find_cut<kThreads>(p, row, piece, per_sum, cuts);
            drop<kThreads>(piece, per_sum, cut, p.min_p[row] * per_sum);  // the largest probability is exp(0) of the sum
        }
        if (mode == kRace) {
            id = race<kThreads>(piece, static_cast<uint64_t>(p.numbers[row]), per_sum, board);
        } else {
            id = invert<kThreads>(piece, p.numbers[row], per_sum, board);
            writes = id != kNoId;
        }
    }
    if (writes && threadIdx.x == 0) {
        // A row without a finite maximum has no token; the id has to exist all the same.
        p.ids[row] = id >= 0 && id < p.num_ids ? id : 0;
        p.best[row] = top;
    }
}

}  // namespace dix

// threads: of a block, 128, 256 or 512. Returns a cudaError_t.
extern "C" int dix_sample_rows(const dix::SampleRows* p, int threads, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (p->num_ids < 1) return cudaErrorInvalidValue;
    if (p->num_rows == 0) return cudaSuccess;
    const int piece = piece_size(p->num_ids), grid = p->num_rows * kPieces;
#define DIX_DRAW(count)                                                                                                       \
    if (threads == count) {                                                                                                   \
        if (share_size<count>(piece) > count) return cudaErrorInvalidValue;                                                   \
        const int bytes = sizeof(Board<count>) + (p->top_p != nullptr ? sizeof(CutBoard<count>) : 0) + piece * 4;                  \
        /* The attribute belongs to the device, not to the process. */                                                        \
        const int status = cudaFuncSetAttribute(draw_rows<count>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);        \
        if (status != cudaSuccess) return status;                                                                             \
        DIX_LAUNCH_CLUSTERS(draw_rows<count>, kPieces, grid, count, bytes, s, *p);                                            \
        return cudaGetLastError();                                                                                            \
    }
    DIX_DRAW(128)
    DIX_DRAW(256)
    DIX_DRAW(512)
#undef DIX_DRAW
    return cudaErrorInvalidValue;
}
