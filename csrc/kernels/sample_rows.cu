// One token per row of logits without sorting and without the host: the largest logit, or a draw from the tempered distribution with
// given random numbers (engine/draws.py is the definition).
//
// One read. Greedy rows and races are streams (sample_stream.cuh, sample_race.cuh). Of other rows a cluster of thread blocks keeps first the
// logits in its shared memory, from which it takes the maximum, then their exponentials, of which it takes the sum. Where filters leave few
// ids, one block draws among those (sample_few.cuh); otherwise ids are dropped (sample_cuts.cuh). Then they race, or their fixed-point weights
// are added up to where the random number falls. What the blocks find is combined in their order, so a token depends on its row alone.
#include "sample_cuts.cuh"
#include "sample_few.cuh"
#include "sample_stream.cuh"

namespace dix {

// exp((logit - top) / temperature) in place of the logits; their sum. By powers of two: what that costs in digits is what a rounding of the
// logits costs as well.
template <int kThreads>
__device__ __forceinline__ float exponentials(const Piece& piece, float top, float factor) {
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
    int64_t left = share_of_total(number, total);
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

// The boards of filters: the short way's and the long way's.
template <int kThreads>
union Filters {
    FewBoard few;
    CutBoard<kThreads> cut;
};

// A token from the row's distribution: kNoId in the blocks that do not have to write it.
template <int kThreads>
__device__ __forceinline__ int draw(const SampleRows& p, int row, const Piece& piece, const Best& mine, float top, float factor, Board<kThreads>& board,
                                    Filters<kThreads>& filters) {
    const auto plus = [](float a, float b) { return a + b; };
    tell_all(over_block<kThreads>(exponentials<kThreads>(piece, top, factor), board.sum_scratch, plus), board.sums);
    sync_told();
    const float per_sum = 1.0f / over_slots(board.sums, plus);
    const bool races = p.modes[row] == kRace;
    if (is_filtered(p, row)) {
        const int level = bits_of(power_of_two((mine.logit - top) * factor) * per_sum);
        int id = kNoId;
        if (draw_of_few<kThreads>(p, row, piece, level, per_sum, board, filters.few, id)) return id;
        const Cut cut = find_cut<kThreads>(p, row, piece, per_sum, filters.cut);
        drop<kThreads>(piece, per_sum, cut, p.min_p[row] * per_sum);  // the largest probability is exp(0) of the sum
    }
    if (!races) return invert<kThreads>(piece, p.numbers[row], per_sum, board);
    const uint64_t key = static_cast<uint64_t>(p.numbers[row]);
    Runners runners;
    for (int first = 0; first < piece.vectors; first += kThreads) {
        const int v = first + static_cast<int>(threadIdx.x);
        const bool inside = v < piece.vectors;
        run(piece.vector(inside ? v : 0), piece.begin + 4 * v, inside, key, OfChances{}, runners);
    }
    const auto chance = [&](int place) { return piece.values[place] * per_sum; };
    const int id = finish_race<kThreads>(piece.begin, piece.vectors, key, runners, board, chance);
    return cluster_rank() == 0 ? id : kNoId;
}

// Rows of a stream; the others are not this kernel's.
template <int kThreads>
__global__ void DIX_CLUSTER(kPieces) __launch_bounds__(kThreads, 1024 / kThreads) stream_rows(const SampleRows p) {
    const int row = blockIdx.x / kPieces;
    if (is_stream(p, row)) draw_from_stream<kThreads>(p, row, *reinterpret_cast<Board<kThreads>*>(shared_memory()));
}

// Rows that are kept; streams are not this kernel's.
template <int kThreads>
__global__ void DIX_CLUSTER(kPieces) __launch_bounds__(kThreads) draw_rows(const SampleRows p) {
    const int row = blockIdx.x / kPieces;
    if (is_stream(p, row)) return;
    auto& board = *reinterpret_cast<Board<kThreads>*>(shared_memory());
    auto& filters = *reinterpret_cast<Filters<kThreads>*>(&board + 1);
    const Piece piece = piece_of(p, p.top_p != nullptr ? reinterpret_cast<float*>(&filters + 1) : reinterpret_cast<float*>(&filters));
    start_loads<kThreads>(piece, p.logits + row * p.row_stride);
    if (p.top_p != nullptr && threadIdx.x == 0) filters.few.count = 0;
    sync_cluster(false);  // all blocks have begun: their memory may be written
    Best mine;
    const auto look = [&](int begin, int end) {
        for (int v = begin + static_cast<int>(threadIdx.x); v < end; v += kThreads) look_for_best(piece.vector(v), piece.begin + 4 * v, mine);
    };
    const int first = first_vectors<kThreads>(piece);
    wait_copies<1>();
    look(0, first);
    wait_copies<0>();
    look(first, piece.vectors);
    const Best best = best_of_row<kThreads>(mine, board);
    int id = best.id;
    bool writes = cluster_rank() == 0;
    if (best.logit > -INFINITY && best.logit < INFINITY) {
        id = draw<kThreads>(p, row, piece, mine, best.logit, kLog2OfE / p.temperature[row], board, filters);
        writes = id != kNoId;
    }
    if (writes) write_token(p, row, id, best.logit);
}

}  // namespace dix

// Returns a cudaError_t.
extern "C" int dix_sample_rows(const dix::SampleRows* p, void* stream) {
    using namespace dix;
    const auto s = static_cast<cudaStream_t>(stream);
    if (p->num_ids < 1) return cudaErrorInvalidValue;
    if (p->num_rows == 0) return cudaSuccess;
    const int piece = piece_size(p->num_ids), grid = p->num_rows * kPieces;
#define DIX_STREAM(count) \
    if (p->streams == count) DIX_LAUNCH_CLUSTERS(stream_rows<count>, kPieces, grid, count, sizeof(Board<count>), s, *p);
    DIX_STREAM(128)
    DIX_STREAM(256)
    DIX_STREAM(512)
#undef DIX_STREAM
    if (p->draws == 0) return cudaGetLastError();
#define DIX_DRAW(count)                                                                                                       \
    if (p->draws == count) {                                                                                                  \
        if (share_size<count>(piece) > count) return cudaErrorInvalidValue;                                                   \
        const int bytes = sizeof(Board<count>) + (p->top_p != nullptr ? sizeof(Filters<count>) : 0) + piece * 4;              \
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
