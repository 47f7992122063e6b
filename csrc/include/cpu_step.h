// One forward step: what it works on, and the parts that the backbone and the draft stages share.
#pragma once

#include <vector>

#include "cpu_draws.h"
#include "cpu_ops.h"
#include "cpu_team.h"

namespace dix {

enum LogitRows { kNone = 0, kLast = 1, kAll = 2 };

// One sequence's part of a step. rect: first position whose window keys decoder layers see; floor: the same for all layers. fresh: first
// position whose compressed entries are written; those before are in the blocks and stay.
// ids: `ngrams - 1` earlier token ids (-1 before the sequence), then the step's own. row, rows: its place among the step's rows.
// sequence: of a piece, the sequence that it is cut from, see Share.
struct Slice {
    int start, end, slot, floor, rect, fresh, logits;
    const int32_t *blocks, *ids;
    int row, rows, sequence;

    int first() const { return end - rows; }
};

// What ranks that compute a step together bring together: all rows; the rows that decoder layers keep, outputs whose logits are wanted, and all
// rows, these three of a rank's own sequences.
enum class Gathered : int32_t { kKeys = 0, kKept = 1, kOutputs = 2, kOwn = 3 };

// mine: [count, width]. out: [rows, width], in the order of the batch.
using Gather = void (*)(int32_t what, const float* mine, int32_t count, int32_t width, float* out, int32_t rows);

// A step whose rows are on several ranks. sequences: whole, with their places among the rows of all ranks; own_from .. own_to are this rank's.
struct Share {
    std::vector<Slice> sequences;
    int own_from, own_to;
    Gather exchange;
};

// Entries that a row attends to. restricted: only blocks marked in `allowed` are candidates of later indexers.
struct Picks {
    Buffer<const float*> keys;
    Buffer<int32_t> entries, counts;
    Buffer<uint8_t> allowed, restricted;
    int stride = 0, blocks = 0;
    bool any = false;
};

// What each member of a team has to itself.
struct MemberScratch {
    ExpertScratch experts;
    AttentionScratch attention;
    Buffer<float> scores, blocks;
    Buffer<int32_t> picked;
    Buffer<uint32_t> ranks;
};

// Positions of a state slot whose taps no draft stage has read yet. What lies before `first` is in the stages' rings already.
struct TapWindow {
    int first = 0, end = 0;
};

// Scratch memory of a model, kept from step to step. Parts of a step that the team shares find every buffer at its size.
struct Workspace {
    Buffer<float> h, x, y, pre, next_pre, post, comb, raw, both, latent, key, q, o, t, plain, scaled, index_q, index_w;
    Buffer<float> pooled, entry, index_key, entry_rot, engram, engram_kv, taps, hidden, states, logits, bias, markov;
    Buffer<float> shared, shared_key, shared_pre;
    Buffer<const float*> index_keys;
    Buffer<int32_t> positions, owner;
    std::vector<MemberScratch> members{1};
    Picks picks;
    DrawScratch draws;
    std::vector<Slice> slices;
    std::vector<TapWindow> tap_windows;  // by state slot
    Team team;
};

// Rows of one step and the operations on all of them.
class Rows {
   public:
    Rows(const Model& model, Workspace& work) : m_(model), w_(work) {}

    // Place the rows of w.slices one after the other and tabulate their rotations.
    void place();
    int count() const { return count_; }

    // Streams start as four copies of the embedding, read through the first.
    void embed(const int32_t* ids);
    // First half of a sublayer's attention: mixes, input, query latent and window key.
    void begin_attention(const Layer& layer);
    void read_input(const Layer& layer, int from, int to);
    // Second half: queries, attention over the keys that `fill(row, list)` names, output, streams. Lists are at most `most_keys` long.
    template <class Fill>
    void finish_attention(const Layer& layer, int most_keys, Fill fill);
    void feed_forward(const Layer& layer);
    void window_key(const float* raw, const Attention& attention, const float* table, float* key) const;

   protected:
    // `work(from, to, own)` for parts of the rows, on as many threads as the step has.
    template <class Work>
    void split(Work work) {
        if (count_ == 0) return;  // a rank's share may be empty
        w_.team.split(count_, [&](int from, int to, int member) { work(from, to, w_.members[member]); });
    }
    void project(const Layer& layer, int from, int to);
    template <class Fill>
    void attend_rows(const Layer& layer, int most_keys, Fill fill, int from, int to, MemberScratch& own);
    void read_ffn_input(const Layer& layer, int from, int to);
    void write(int from, int to);

    const float* table(const Layer& layer, int row) const {
        return (layer.ratio ? w_.scaled : w_.plain).get(size_t(count_) * m_.rope_dim) + int64_t(row) * m_.rope_dim;
    }

    const Model& m_;
    Workspace& w_;
    int count_ = 0;
};

template <class Fill>
void Rows::attend_rows(const Layer& layer, int most_keys, Fill fill, int from, int to, MemberScratch& own) {
    const AttentionShape shape = {m_.heads, m_.head_dim, layer.attention.sink};
    const int64_t lanes = layer.attention.wq_b.rows, width = int64_t(m_.heads) * m_.head_dim;
    const float* q = w_.q.get(0);
    float* o = w_.o.get(0);
    const int32_t* owner = w_.owner.get(0);
    for (int r = from; r < to;) {
        KeyList lists[2] = {own.attention.list(0, most_keys), own.attention.list(1, most_keys)};
        fill(r, lists[0]);
        // Neighbours of one sequence see nearly the same keys.
        if (r + 1 < to && owner[r] == owner[r + 1]) {
            fill(r + 1, lists[1]);
            const float* const queries[2] = {q + r * lanes, q + (r + 1) * lanes};
            float* const outputs[2] = {o + r * width, o + (r + 1) * width};
            attend(shape, queries, lists, own.attention, outputs);
            r += 2;
        } else {
            attend(shape, q + r * lanes, lists[0], own.attention, o + r * width);
            ++r;
        }
    }
}

template <class Fill>
void Rows::finish_attention(const Layer& layer, int most_keys, Fill fill) {
    const Attention& a = layer.attention;
    const int half = m_.rope_dim / 2, tail = m_.head_dim - m_.rope_dim;
    const int64_t lanes = a.wq_b.rows, width = int64_t(m_.heads) * m_.head_dim, rank = int64_t(m_.groups) * m_.group_rank, part = width / m_.groups;
    float* q = w_.q.get(count_ * lanes);
    float* o = w_.o.get(count_ * width);
    float* t = w_.t.get(count_ * rank);
    float* y = w_.y.get(size_t(count_) * m_.hidden);
    split([&](int from, int to, MemberScratch& own) {
        const int count = to - from;
        linear(a.wq_b, w_.latent.get(0) + int64_t(from) * m_.q_rank, m_.q_rank, q + from * lanes, lanes, count);
        for (int r = from; r < to; ++r) {
            for (int64_t lane = 0; lane < lanes; lane += kLanes * m_.head_dim) rotate_lanes(q + r * lanes + lane + tail * kLanes, table(layer, r), half);
        }
        attend_rows(layer, most_keys, fill, from, to, own);
        for (int r = from; r < to; ++r) {
            for (int head = 0; head < m_.heads; ++head) rotate(o + r * width + head * m_.head_dim + tail, table(layer, r), half, -1.0f);
        }
        for (int g = 0; g < m_.groups; ++g) linear(a.wo_a, g, o + from * width + g * part, width, t + from * rank + g * m_.group_rank, rank, count);
        linear(a.wo_b, t + from * rank, rank, y + int64_t(from) * m_.hidden, m_.hidden, count);
        write(from, to);
    });
}

}  // namespace dix
