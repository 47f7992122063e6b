// The backbone over one step: layers, compressed entries, windows, logits.
#include <algorithm>

#include "cpu_backbone.h"

namespace dix {

void Backbone::run(bool compact, bool keep, float* logits) {
    place();
    w_.team.begin(count_);
    w_.members.resize(w_.team.members());
    std::vector<int32_t> ids;
    for (const Slice& s : w_.slices) ids.insert(ids.end(), s.ids + m_.ngrams - 1, s.ids + m_.ngrams - 1 + s.rows);
    embed(ids.data());
    w_.picks.any = false;
    int taps = 0, wanted = 0;
    for (int i = 0; i < m_.num_layers; ++i) wanted += m_.draft != nullptr && m_.layers[i].tap;
    for (int number = 0; number < m_.num_layers; ++number) {
        const Layer& layer = m_.layers[number];
        if (layer.engram != nullptr) look_up(*layer.engram);
        bool compressed = false;
        if (number == m_.boundary) {
            decoder_ = true;
            if (compact) {
                // All rows of the chunk are compressed, then the rows that decoder layers do not see are dropped.
                w_.x.get(size_t(count_) * m_.hidden);
                split([&](int from, int to, MemberScratch&) { read_input(layer, from, to); });
                compress(layer);
                compressed = true;
                if (!(share_ ? drop_shared_rows() : drop_rows())) return;
            }
        }
        if (layer.tap && wanted > 0) {
            tap(taps++);
            if (taps == wanted && share_) store_own_taps();
            if (taps == wanted && !share_) {
                if (keep && can_keep_taps()) {
                    keep_taps();
                } else {
                    store_taps(w_.taps.get(0));
                }
            }
        }
        begin_attention(layer);
        const float* keys = gather(Gathered::kKeys, w_.key.get(0), m_.head_dim, w_.shared_key, stored_rows());
        if (layer.compressor != nullptr && !compressed) compress(layer);
        if (layer.indexer != nullptr) select(layer);
        attend_window(layer, keys);
        feed_forward(layer);
    }
    read_logits(logits);
}

void Backbone::look_up(const Engram& engram) {
    const int width = m_.engram_columns * m_.engram_dim, back = m_.ngrams - 1;
    float* values = w_.engram.get(size_t(count_) * width);
    float* kv = w_.engram_kv.get(size_t(count_) * engram.wkv.rows);
    const int64_t outputs = engram.wkv.rows;
    split([&](int from, int to, MemberScratch&) {
        std::vector<int32_t> grams(m_.ngrams);
        for (int r = from; r < to; ++r) {
            const Slice& s = w_.slices[w_.owner.get(0)[r]];
            const int32_t* newest = s.ids + back + (r - s.row);
            for (int n = 0; n < m_.ngrams; ++n) grams[n] = newest[-n] < 0 ? -1 : m_.token_map[newest[-n]];
            engram_lookup(engram, m_, grams.data(), values + int64_t(r) * width);
        }
        linear(engram.wkv, values + int64_t(from) * width, width, kv + from * outputs, outputs, to - from);
        for (int r = from; r < to; ++r) engram_gate(engram, m_, kv + r * outputs, w_.h.get(0) + int64_t(r) * kStreams * m_.hidden);
    });
}

// The pooled pair whose second token is `row`; the first may belong to an earlier step.
const float* Backbone::pool(const Compressor& c, const Slice& s, const float* both, int row, float* out) const {
    const int d = m_.head_dim, position = s.first() + row - s.row;
    const float* second = both + int64_t(row) * 2 * d;
    const float* first = second - 2 * d;
    if (row == s.row) first = c.partial + (int64_t(s.slot) * m_.partial_rows + (position - 1) % m_.partial_rows) * 2 * d;
    for (int i = 0; i < d; i += 16) {
        // A softmax over two values is a sigmoid of their difference.
        const F16 share = sigmoid(load<F16>(first + d + i) - load<F16>(second + d + i)), a = load<F16>(first + i), b = load<F16>(second + i);
        store(out + i, share < 0.5f ? b + share * (a - b) : a - (a - b) * (1.0f - share));
    }
    return out;
}

void Backbone::compress(const Layer& layer) {
    const Compressor& c = *layer.compressor;
    const int d = m_.head_dim, width = c.wkv.rows, ratio = layer.ratio, half = m_.rope_dim / 2, per_block = m_.block_size / ratio;
    const int all = stored_rows();
    float* mine = w_.both.get(size_t(count_) * std::max(width, m_.q_rank + d));
    float* latents = w_.entry.get(size_t(all) * d);
    float* index_keys = w_.index_key.get(size_t(all) * m_.index_dim);
    float* pooled = w_.pooled.get(d);
    float* rot = w_.entry_rot.get(m_.rope_dim);
    split([&](int from, int to, MemberScratch&) {
        linear(c.wkv, w_.x.get(0) + int64_t(from) * m_.hidden, m_.hidden, mine + int64_t(from) * width, width, to - from);
    });
    const float* both = gather(Gathered::kKeys, mine, width, w_.shared, all);
    int entries = 0;
    for (const Slice& s : stored()) {
        for (int r = s.row; r < s.row + s.rows; ++r) {
            const int position = s.first() + r - s.row;
            if (position < s.fresh || (position + 1) % ratio) continue;
            const float* raw = ratio == 2 ? pool(c, s, both, r, pooled) : both + int64_t(r) * width;
            rms_norm(raw, c.norm, m_.rms_eps, d, latents + int64_t(entries++) * d);
        }
    }
    // The index key reads the latent before it is rotated in place.
    linear(c.wk, latents, d, index_keys, m_.index_dim, entries);
    entries = 0;
    for (const Slice& s : stored()) {
        for (int r = s.row; r < s.row + s.rows; ++r) {
            const int position = s.first() + r - s.row, entry = position / ratio;
            if (position < s.fresh || (position + 1) % ratio) continue;
            float *latent = latents + int64_t(entries) * d, *key = index_keys + int64_t(entries) * m_.index_dim;
            ++entries;
            rotation(int64_t(entry) * ratio, m_.scaled_frequencies, half, rot);
            rms_norm(key, c.k_norm, m_.rms_eps, m_.index_dim, key);
            rotate(key + m_.index_dim - m_.rope_dim, rot, half, 1.0f);
            rotate(latent + d - m_.rope_dim, rot, half, 1.0f);
            if (m_.quantize_kv) {
                q4_kv(latent, d);
                q4_index(key, m_.index_dim);
            }
            const int64_t block = s.blocks[entry / per_block];
            std::memcpy(m_.kv_rows + (block * m_.kv_stride + c.kv_offset + entry % per_block) * d, latent, d * sizeof(float));
            std::memcpy(m_.index_rows + (block * m_.index_stride + c.index_offset + entry % per_block) * m_.index_dim, key, m_.index_dim * sizeof(float));
        }
        if (ratio != 2) continue;
        for (int r = std::max(s.row, s.row + s.rows - m_.partial_rows); r < s.row + s.rows; ++r) {
            const int64_t place = int64_t(s.slot) * m_.partial_rows + (s.first() + r - s.row) % m_.partial_rows;
            std::memcpy(c.partial + place * 2 * d, both + int64_t(r) * 2 * d, 2 * d * sizeof(float));
        }
    }
}

bool Backbone::drop_rows() {
    const int width = kStreams * m_.hidden;
    float *h = w_.h.get(0), *pre = w_.pre.get(0);
    int kept = 0;
    for (Slice& s : w_.slices) {
        const int rows = std::clamp(s.end - s.rect, 0, s.rows), from = s.row + s.rows - rows;
        std::memmove(h + int64_t(kept) * width, h + int64_t(from) * width, size_t(rows) * width * sizeof(float));
        std::memmove(pre + kept * kStreams, pre + from * kStreams, size_t(rows) * kStreams * sizeof(float));
        s.rows = rows;
        kept += rows;
    }
    place();
    return kept > 0;
}

// Keys of the window that a row sees: those of this step beside the ring, older ones from it.
void Backbone::window(const Layer& layer, const float* keys, int row, KeyList& list) const {
    const Slice& s = whole(w_.slices[w_.owner.get(0)[row]]);
    const int position = w_.positions.get(0)[row];
    for (int p = std::max({0, position - m_.window + 1, rect(s), s.floor}); p <= position; ++p) {
        list.add(p >= s.first() ? keys + int64_t(s.row + p - s.first()) * m_.head_dim : ring_row(layer.ring, s, p), p);
    }
}

void Backbone::attend_window(const Layer& layer, const float* keys) {
    const Picks& p = w_.picks;
    const bool selects = layer.ratio > 0 && p.any;
    finish_attention(layer, m_.window + m_.index_topk, [&](int row, KeyList& list) {
        window(layer, keys, row, list);
        if (!selects) return;
        const int64_t first = int64_t(row) * p.stride;
        for (int i = 0; i < w_.picks.counts.get(0)[row]; ++i) {
            list.add(w_.picks.keys.get(0)[first + i], kEntries + w_.picks.entries.get(0)[first + i]);
        }
    });
    store_keys(layer.ring, keys);
}

// A chunk may be longer than the ring: only its last keys are stored, after all rows have read what they overwrite.
void Backbone::store_keys(float* ring, const float* key) {
    for (const Slice& s : stored()) {
        for (int p = std::max({s.first(), s.end - m_.ring_rows, rect(s)}); p < s.end; ++p) {
            std::memcpy(ring_row(ring, s, p), key + int64_t(s.row + p - s.first()) * m_.head_dim, m_.head_dim * sizeof(float));
        }
    }
}

// Mean over the streams: input number `place` of the draft stages.
void Backbone::tap(int place) {
    const int hidden = m_.hidden, width = m_.draft->main_proj.cols;
    float* taps = w_.taps.get(size_t(count_) * width);
    for (int r = 0; r < count_; ++r) {
        const float* h = w_.h.get(0) + int64_t(r) * kStreams * hidden;
        float* out = taps + int64_t(r) * width + place * hidden;
        for (int c = 0; c < hidden; ++c) out[c] = (((h[c] + h[hidden + c]) + h[2 * hidden + c]) + h[3 * hidden + c]) / kStreams;
    }
}

// Extend the window ring of every draft stage.
void Backbone::store_taps(const float* taps) {
    const Draft& draft = *m_.draft;
    const int64_t hidden = m_.hidden, width = draft.main_proj.cols, d = m_.head_dim;
    float* x = w_.hidden.get(size_t(count_) * hidden);
    float* raw = w_.both.get(size_t(count_) * d);
    float* key = w_.key.get(size_t(count_) * d);
    split([&](int from, int to, MemberScratch&) {
        linear(draft.main_proj, taps + from * width, width, x + from * hidden, hidden, to - from);
        for (int r = from; r < to; ++r) rms_norm(x + r * hidden, draft.main_norm, m_.rms_eps, m_.hidden, x + r * hidden);
    });
    for (int number = 0; number < m_.num_stages; ++number) {
        const Layer& stage = m_.stages[number];
        split([&](int from, int to, MemberScratch&) {
            linear(stage.attention.wkv, x + from * hidden, hidden, raw + from * d, d, to - from);
            for (int r = from; r < to; ++r) window_key(raw + r * d, stage.attention, table(stage, r), key + r * d);
        });
        store_keys(stage.ring, key);
    }
    for (const Slice& s : stored()) tap_window(s.slot).first = tap_window(s.slot).end = s.end;
}

TapWindow& Backbone::tap_window(int slot) const {
    if (size_t(slot) >= w_.tap_windows.size()) w_.tap_windows.resize(slot + 1);
    return w_.tap_windows[slot];
}

bool Backbone::can_keep_taps() const {
    return std::all_of(w_.slices.begin(), w_.slices.end(), [&](const Slice& s) { return s.rows <= m_.draft->block_size + 1; });
}

// Nobody may ever draft from these positions, and who does may find half of them refused: only copy what a draft would start from.
void Backbone::keep_taps() {
    const int64_t width = m_.draft->main_proj.cols;
    for (const Slice& s : w_.slices) {
        TapWindow& t = tap_window(s.slot);
        // A gap, or a start before what is kept: others have written the ring up to here, or the slot has a new sequence.
        if (s.first() < t.first || s.first() > t.end) t.first = s.first();
        t.end = s.end;
        t.first = std::max(t.first, t.end - m_.draft->tap_places);
        for (int p = s.first(); p < s.end; ++p) {
            const float* row = w_.taps.get(0) + (s.row + p - s.first()) * width;
            std::memcpy(tap_row(s.slot, p), row, width * sizeof(float));
        }
    }
}

void Backbone::settle_taps(const int32_t* ints, int count) {
    const int64_t width = m_.draft->main_proj.cols;
    w_.slices.clear();
    for (int i = 0; i < count; ++i, ints += 4) {
        const TapWindow& t = tap_window(ints[2]);
        Slice s = {};
        s.slot = ints[2];
        s.end = std::min(t.end, ints[1] + 1);
        s.start = std::max(t.first, ints[1] + 1 - m_.window);
        s.rows = s.end - s.start;
        if (s.rows > 0) w_.slices.push_back(s);
    }
    if (w_.slices.empty()) return;
    place();
    w_.team.begin(0);
    float* taps = w_.taps.get(size_t(count_) * width);
    for (const Slice& s : w_.slices) {
        for (int p = s.start; p < s.end; ++p) std::memcpy(taps + (s.row + p - s.start) * width, tap_row(s.slot, p), width * sizeof(float));
    }
    store_taps(taps);
}

void Backbone::read_logits(float* logits) {
    const int hidden = m_.hidden;
    int wanted = 0;
    float* x = w_.hidden.get(size_t(count_) * hidden);
    if (share_) {
        for (int r = 0; r < count_; ++r) read_output(r, x + int64_t(r) * hidden);
        for (const Slice& s : own_slices()) wanted += s.logits == kAll ? s.rows : s.logits == kLast;
        return linear(m_.head, gather(Gathered::kOutputs, x, hidden, w_.shared, wanted), hidden, logits, m_.vocab, wanted);
    }
    for (const Slice& s : w_.slices) {
        const int first = s.logits == kAll ? s.row : s.row + s.rows - 1;
        for (int r = first; s.logits != kNone && r < s.row + s.rows; ++r) {
            read_output(r, x + int64_t(wanted++) * hidden);
        }
    }
    linear(m_.head, x, hidden, logits, m_.vocab, wanted);
}

void Backbone::read_output(int row, float* x) const {
    collapse(w_.h.get(0) + int64_t(row) * kStreams * m_.hidden, w_.pre.get(0) + row * kStreams, m_.hidden, x);
    rms_norm(x, m_.norm, m_.rms_eps, m_.hidden, x);
}

// ints: number of slices, flags; per slice start, length, slot, floor, rect, fresh, logits, number of blocks, the blocks, earlier ids, own ids.
int read_slices(const Model& model, const int32_t* ints, std::vector<Slice>& slices) {
    const int count = *ints++;
    const int flags = *ints++;
    slices.clear();
    for (int i = 0; i < count; ++i) {
        Slice s = {};
        s.start = ints[0];
        s.rows = ints[1];
        s.end = s.start + s.rows;
        s.slot = ints[2];
        s.floor = ints[3];
        s.rect = ints[4];
        s.fresh = ints[5];
        s.logits = ints[6];
        s.blocks = ints + 8;
        s.ids = s.blocks + ints[7];
        ints = s.ids + model.ngrams - 1 + s.rows;
        slices.push_back(s);
    }
    return flags;
}

}  // namespace dix

extern "C" int64_t dix_model_bytes() { return sizeof(dix::Model); }

extern "C" int64_t dix_layer_bytes() { return sizeof(dix::Layer); }

extern "C" void* dix_open() { return new dix::Workspace; }

extern "C" void dix_close(void* work) { delete static_cast<dix::Workspace*>(work); }

// Threads of steps with at least `least_rows` rows; polite: only while the machine has cores to spare.
extern "C" void dix_set_threads(void* work, int threads, int least_rows, int polite) {
    static_cast<dix::Workspace*>(work)->team.set(threads, least_rows, polite != 0);
}

// logits: [wanted rows, V].
extern "C" void dix_step(const dix::Model* model, void* work, const int32_t* ints, float* logits) {
    auto& w = *static_cast<dix::Workspace*>(work);
    const int flags = dix::read_slices(*model, ints, w.slices);
    dix::Backbone(*model, w, nullptr).run(flags & dix::kCompact, flags & dix::kKeepTaps, logits);
}

// The same for a caller that wants only the largest of the first `num_ids` logits of each of the `wanted` rows, and its place.
extern "C" void dix_step_greedy(const dix::Model* model, void* work, const int32_t* ints, int num_ids, int wanted, int32_t* ids, float* values) {
    float* logits = static_cast<dix::Workspace*>(work)->logits.get(size_t(wanted) * model->vocab);
    dix_step(model, work, ints, logits);
    for (int r = 0; r < wanted; ++r) ids[r] = dix::largest(logits + int64_t(r) * model->vocab, num_ids, values + r);
}

// The same for rows that draw, or judge drafts, see `choose_rows`.
extern "C" void dix_step_drawn(const dix::Model* model, void* work, const int32_t* ints, int num_ids, int wanted, const dix::Choice* choices,
                               int num_choices, const int32_t* drafts, int32_t* ids, float* values) {
    auto& w = *static_cast<dix::Workspace*>(work);
    float* logits = w.logits.get(size_t(wanted) * model->vocab);
    dix_step(model, work, ints, logits);
    dix::choose_rows(logits, model->vocab, num_ids, choices, num_choices, drafts, model->vocab, w.draws, ids, values);
}

// Tokens of rows whose logits the caller has, see `choose_rows`.
extern "C" void dix_choose(void* work, const float* logits, int64_t distance, int vocab, const dix::Choice* choices, int num_choices,
                           const int32_t* drafts, int32_t* ids) {
    dix::DrawScratch& scratch = static_cast<dix::Workspace*>(work)->draws;
    dix::choose_rows(logits, distance, vocab, choices, num_choices, drafts, vocab, scratch, ids, nullptr);
}
