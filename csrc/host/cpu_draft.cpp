// The draft stages: a block of noise tokens behind the last known one, seen by all of its rows, over the windows of main keys.
#include <algorithm>

#include "cpu_backbone.h"

namespace dix {
namespace {

// ints: per sequence token, position, slot, first valid position. states: [count * N, C]; logits: [count * N, V].
void draft_block(const Model& m, Workspace& w, const int32_t* ints, int count, float* states, float* logits) {
    const Draft& draft = *m.draft;
    const int size = draft.block_size;
    std::vector<int32_t> ids;
    Backbone(m, w, nullptr).settle_taps(ints, count);
    w.slices.clear();
    for (int i = 0; i < count; ++i) {
        const int32_t *own = ints + 4 * i, position = own[1];
        Slice s = {};
        s.start = position + 1;
        s.end = position + 1 + size;
        s.rows = size;
        s.slot = own[2];
        s.floor = own[3];
        w.slices.push_back(s);
        ids.push_back(own[0]);
        ids.insert(ids.end(), size - 1, draft.noise_id);
    }
    w.team.begin(0);
    Rows rows(m, w);
    rows.place();
    rows.embed(ids.data());
    for (int number = 0; number < m.num_stages; ++number) {
        const Layer& stage = m.stages[number];
        rows.begin_attention(stage);
        rows.finish_attention(stage, m.window + size, [&](int row, KeyList& list) {
            const Slice& s = w.slices[row / size];
            // All rows of a block see the same window, the one of the last known position.
            for (int p = std::max(s.floor, s.start - m.window); p < s.start; ++p) {
                list.add(stage.ring + (int64_t(s.slot) * m.ring_rows + p % m.ring_rows) * m.head_dim, p);
            }
            for (int r = s.row; r < s.row + size; ++r) list.add(w.key.get(0) + int64_t(r) * m.head_dim, s.start + r - s.row);
        });
        rows.feed_forward(stage);
    }
    float* x = w.hidden.get(size_t(rows.count()) * m.hidden);
    for (int r = 0; r < rows.count(); ++r) {
        float* state = states + int64_t(r) * m.hidden;
        collapse(w.h.get(0) + int64_t(r) * kStreams * m.hidden, w.pre.get(0) + r * kStreams, m.hidden, state);
        rms_norm(state, draft.norm, m.rms_eps, m.hidden, x + int64_t(r) * m.hidden);
    }
    linear(m.head, x, m.hidden, logits, m.vocab, rows.count());
}

// logits += bias. Returns the place of the largest, the first of equals; 0 when all are NaN.
int add_and_choose(float* logits, const float* bias, int count) {
    const F16 none = splat<F16>(-INFINITY);
    F16 best = none;
    int v = 0;
    for (; v + 16 <= count; v += 16) {
        const F16 value = load<F16>(logits + v) + load<F16>(bias + v);
        store(logits + v, value);
        best = value > best ? value : best;
    }
    float most[16];
    store(most, best);
    float top = *std::max_element(most, most + 16);
    for (; v < count; ++v) top = std::max(top, logits[v] += bias[v]);
    const float* found = std::find(logits, logits + count, top);
    return found == logits + count ? 0 : int(found - logits);
}

// Walk through the block: each choice shifts the logits of the next place. first: `count` ids before the block, at a distance. choose: given
// sequence, place and logits with their largest id, the id that the sequence takes.
template <class Choose>
void propose(const Model& m, Workspace& w, const float* states, const int32_t* first, int stride, int count, float* logits, int64_t* ids,
             float* confidence, Choose choose) {
    const Draft& draft = *m.draft;
    const int rank = draft.markov_rank;
    float *bias = w.bias.get(size_t(count) * m.vocab), *markov = w.markov.get(size_t(count) * rank);
    for (int place = 0; place < draft.block_size; ++place) {
        for (int i = 0; i < count; ++i) {
            const int64_t row = int64_t(i) * draft.block_size + place, previous = place ? ids[row - 1] : first[i * stride];
            float* own = markov + int64_t(i) * rank;
            std::memcpy(own, draft.markov_embed + previous * rank, rank * sizeof(float));
            confidence[row] = dot(states + row * m.hidden, draft.confidence, m.hidden) + dot(own, draft.confidence + m.hidden, rank);
        }
        linear(draft.markov_head, markov, rank, bias, m.vocab, count);
        for (int i = 0; i < count; ++i) {
            const int64_t row = int64_t(i) * draft.block_size + place;
            float* own = logits + row * m.vocab;
            ids[row] = choose(i, place, own, add_and_choose(own, bias + int64_t(i) * m.vocab, m.vocab));
        }
    }
}

int take(int, int, const float*, int best) { return best; }

}  // namespace
}  // namespace dix

extern "C" void dix_draft(const dix::Model* model, void* work, const int32_t* ints, int count, float* states, float* logits) {
    dix::draft_block(*model, *static_cast<dix::Workspace*>(work), ints, count, states, logits);
}

extern "C" void dix_propose(const dix::Model* model, void* work, const float* states, const int32_t* first, int count, float* logits, int64_t* ids,
                            float* confidence) {
    dix::propose(*model, *static_cast<dix::Workspace*>(work), states, first, 1, count, logits, ids, confidence,
                 dix::take);
}

// Both at once, for a caller that wants no logits.
extern "C" void dix_draft_greedy(const dix::Model* model, void* work, const int32_t* ints, int count, int64_t* ids, float* confidence) {
    auto& w = *static_cast<dix::Workspace*>(work);
    const size_t rows = size_t(count) * model->draft->block_size;
    float *states = w.states.get(rows * model->hidden), *logits = w.logits.get(rows * model->vocab);
    dix::draft_block(*model, w, ints, count, states, logits);
    dix::propose(*model, w, states, ints, 4, count, logits, ids, confidence, dix::take);
}

// The same where the first `places` drafts of every sequence are drawn. choices: one for each, with what they are drawn from as a result.
extern "C" void dix_draft_drawn(const dix::Model* model, void* work, const int32_t* ints, int count, const dix::Choice* choices, int places,
                                int64_t* ids, float* confidence) {
    auto& w = *static_cast<dix::Workspace*>(work);
    const int vocab = model->vocab;
    const size_t rows = size_t(count) * model->draft->block_size;
    float *states = w.states.get(rows * model->hidden), *logits = w.logits.get(rows * vocab);
    dix::draft_block(*model, w, ints, count, states, logits);
    dix::propose(*model, w, states, ints, 4, count, logits, ids, confidence, [&](int i, int place, const float* own, int best) {
        const dix::Choice& c = choices[i];
        if (c.mode == dix::Mode::kGreedy || place >= places || !std::isfinite(own[best])) return best;
        const float* probs = dix::distribution(own, vocab, own[best], c, w.draws);
        if (c.proposal != nullptr) std::memcpy(c.proposal + int64_t(place) * vocab, probs, vocab * sizeof(float));
        return dix::draw(probs, vocab, c, place);
    });
}
