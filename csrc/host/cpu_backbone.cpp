// The backbone over one step: layers, compressed entries, selections, windows, logits.
#include <algorithm>

#include "cpu_step.h"

namespace dix {
namespace {

constexpr int32_t kEntries = 1 << 30;  // names of compressed entries follow those of the window, which are positions

class Backbone : Rows {
   public:
    Backbone(const Model& model, Workspace& work) : Rows(model, work) {}
    void run(bool compact, float* logits);

   private:
    void look_up(const Engram& engram);
    void compress(const Layer& layer);
    const float* pool(const Compressor& c, const Slice& s, const float* both, int row, float* out) const;
    void select(const Layer& layer);
    bool must_choose(const Indexer& indexer, int row, int ratio) const;
    void score_slice(const Indexer& indexer, const Slice& s, int ratio);
    void score_pair(const Indexer& indexer, const float* const* keys, int first, int rows, int count, int ratio, MemberScratch& own);
    void take_all(const Indexer& indexer, int row, int ratio, MemberScratch& own);
    void choose(const Indexer& indexer, int row, float* scores, int ratio, MemberScratch& own);
    void locate(const Indexer& indexer, int row, int ratio, const int32_t* entries, int count);
    bool drop_rows();
    void attend_window(const Layer& layer);
    void window(const Layer& layer, int row, KeyList& list) const;
    void store_keys(float* ring, const float* key);
    void tap(int place);
    void store_taps();
    void read_logits(float* logits);
    int rect(const Slice& s) const { return decoder_ ? s.rect : 0; }
    int visible(int row, int ratio) const { return (w_.positions.get(0)[row] + 1) / ratio; }
    float* ring_row(float* ring, const Slice& s, int position) const {
        return ring + (int64_t(s.slot) * m_.ring_rows + position % m_.ring_rows) * m_.head_dim;
    }

    bool decoder_ = false;
};

void Backbone::run(bool compact, float* logits) {
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
                if (!drop_rows()) return;
            }
        }
        if (layer.tap && wanted > 0) {
            tap(taps++);
            if (taps == wanted) store_taps();
        }
        begin_attention(layer);
        if (layer.compressor != nullptr && !compressed) compress(layer);
        if (layer.indexer != nullptr) select(layer);
        attend_window(layer);
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
    const int d = m_.head_dim, position = w_.positions.get(0)[row];
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
    float* both = w_.both.get(size_t(count_) * std::max(width, m_.q_rank + d));
    float* latents = w_.entry.get(size_t(count_) * d);
    float* index_keys = w_.index_key.get(size_t(count_) * m_.index_dim);
    float* pooled = w_.pooled.get(d);
    float* rot = w_.entry_rot.get(m_.rope_dim);
    split([&](int from, int to, MemberScratch&) {
        linear(c.wkv, w_.x.get(0) + int64_t(from) * m_.hidden, m_.hidden, both + int64_t(from) * width, width, to - from);
    });
    int entries = 0;
    for (const Slice& s : w_.slices) {
        for (int r = s.row; r < s.row + s.rows; ++r) {
            if ((w_.positions.get(0)[r] + 1) % ratio) continue;
            const float* raw = ratio == 2 ? pool(c, s, both, r, pooled) : both + int64_t(r) * width;
            rms_norm(raw, c.norm, m_.rms_eps, d, latents + int64_t(entries++) * d);
        }
    }
    // The index key reads the latent before it is rotated in place.
    linear(c.wk, latents, d, index_keys, m_.index_dim, entries);
    entries = 0;
    for (const Slice& s : w_.slices) {
        for (int r = s.row; r < s.row + s.rows; ++r) {
            const int position = w_.positions.get(0)[r], entry = position / ratio;
            if ((position + 1) % ratio) continue;
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
            const int64_t place = int64_t(s.slot) * m_.partial_rows + w_.positions.get(0)[r] % m_.partial_rows;
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

void Backbone::select(const Layer& layer) {
    const Indexer& indexer = *layer.indexer;
    const int ratio = layer.ratio, lanes = indexer.wq_b.rows, half = m_.rope_dim / 2;
    int most = 0;
    for (const Slice& s : w_.slices) most = std::max(most, s.end / ratio);
    Picks& p = w_.picks;
    if (indexer.publishes || !indexer.restricted) {
        p.blocks = (most + m_.candidate_size - 1) / m_.candidate_size;
        std::fill_n(p.restricted.get(count_), count_, 0);
        p.allowed.get(size_t(count_) * p.blocks);
    }
    p.stride = m_.index_topk;
    p.any = true;
    p.keys.get(size_t(count_) * p.stride);
    p.entries.get(size_t(count_) * p.stride);
    p.counts.get(count_);
    for (MemberScratch& own : w_.members) own.picked.get(most + kLanes);
    const bool search = most > std::min(m_.index_topk, indexer.publishes ? m_.candidate_blocks * m_.candidate_size : m_.index_topk);
    if (!search) {
        for (int r = 0; r < count_; ++r) take_all(indexer, r, ratio, w_.members[0]);
        return;
    }
    float* q = w_.index_q.get(size_t(count_) * lanes);
    float* weights = w_.index_w.get(size_t(count_) * m_.index_heads);
    const float factor = 1.0f / std::sqrt(float(m_.index_dim)) * (1.0f / std::sqrt(float(m_.index_heads)));
    split([&](int from, int to, MemberScratch&) {
        float *own = q + int64_t(from) * lanes, *heads = weights + int64_t(from) * m_.index_heads;
        linear(indexer.wq_b, w_.latent.get(0) + int64_t(from) * m_.q_rank, m_.q_rank, own, lanes, to - from);
        linear(indexer.weights, w_.x.get(0) + int64_t(from) * m_.hidden, m_.hidden, heads, m_.index_heads, to - from);
        for (int i = 0; i < (to - from) * m_.index_heads; ++i) heads[i] *= factor;
        for (int r = from; r < to; ++r) {
            for (int lane = 0; lane < lanes; lane += kLanes * m_.index_dim) {
                float* part = q + int64_t(r) * lanes + lane;
                rotate_lanes(part + (m_.index_dim - m_.rope_dim) * kLanes, w_.scaled.get(0) + int64_t(r) * m_.rope_dim, half);
                if (m_.quantize_kv) q4_index_lanes(part, m_.index_dim);
            }
        }
    });
    for (const Slice& s : w_.slices) score_slice(indexer, s, ratio);
}

// Whether a row has more entries than it may use.
bool Backbone::must_choose(const Indexer& indexer, int row, int ratio) const {
    const int count = visible(row, ratio);
    return count > m_.index_topk || (indexer.publishes && count > m_.candidate_blocks * m_.candidate_size);
}

void Backbone::score_slice(const Indexer& indexer, const Slice& s, int ratio) {
    const int per_block = m_.block_size / ratio, count = s.end / ratio;
    const float** keys = w_.index_keys.get(count + kLanes);
    for (int e = 0; e < count; ++e) {
        keys[e] = m_.index_rows + (s.blocks[e / per_block] * m_.index_stride + indexer.index_offset + e % per_block) * m_.index_dim;
    }
    if (count > 0) pad_keys(keys, count);
    w_.team.split(s.rows, [&](int from, int to, int member) {
        for (int r = s.row + from; r < s.row + to; r += 2) score_pair(indexer, keys, r, std::min(2, s.row + to - r), count, ratio, w_.members[member]);
    });
}

// One row or two neighbours. count: keys of their sequence.
void Backbone::score_pair(const Indexer& indexer, const float* const* keys, int first, int rows, int count, int ratio, MemberScratch& own) {
    float* scores = own.scores.get(2 * size_t(count + kLanes));
    IndexRow asking[2];
    int num_asking = 0;
    for (int r = first; r < first + rows; ++r) {
        if (!must_choose(indexer, r, ratio)) {
            take_all(indexer, r, ratio, own);
            continue;
        }
        const float* q = w_.index_q.get(0) + int64_t(r) * indexer.wq_b.rows;
        asking[num_asking] = {q, w_.index_w.get(0) + int64_t(r) * m_.index_heads, visible(r, ratio), scores + num_asking * (count + kLanes)};
        ++num_asking;
    }
    if (num_asking == 1) index_scores(asking[0], keys, m_.index_heads, m_.index_dim, own.attention);
    if (num_asking == 2) index_scores(asking, keys, m_.index_heads, m_.index_dim, own.attention);
    // Later rows see more, so one that asks alone is the last of the two.
    for (int i = 0; i < num_asking; ++i) choose(indexer, first + rows - num_asking + i, asking[i].scores, ratio, own);
}

void Backbone::take_all(const Indexer& indexer, int row, int ratio, MemberScratch& own) {
    const int count = visible(row, ratio);
    int32_t* picked = own.picked.get(0);
    for (int i = 0; i < count; ++i) picked[i] = i;
    locate(indexer, row, ratio, picked, count);
}

void Backbone::choose(const Indexer& indexer, int row, float* scores, int ratio, MemberScratch& own) {
    Picks& p = w_.picks;
    const int count = visible(row, ratio), size = m_.candidate_size;
    int32_t* picked = own.picked.get(0);
    uint64_t* order = own.order.get(count);
    uint8_t* allowed = p.allowed.get(0) + int64_t(row) * p.blocks;
    if (indexer.publishes && count > m_.candidate_blocks * size) {
        const int blocks = (count + size - 1) / size;
        float* best = own.blocks.get(blocks);
        for (int b = 0; b < blocks; ++b) best[b] = *std::max_element(scores + b * size, scores + std::min(count, (b + 1) * size));
        best[blocks - 1] = INFINITY;  // the newest block is always kept
        const int kept = select_top(best, blocks, m_.candidate_blocks, order, picked);
        std::fill_n(allowed, p.blocks, 0);
        for (int i = 0; i < kept; ++i) allowed[picked[i]] = 1;
        p.restricted.get(0)[row] = 1;
    } else if (indexer.restricted && p.restricted.get(0)[row]) {
        for (int i = 0; i < count; ++i) {
            if (!allowed[i / size]) scores[i] = -INFINITY;
        }
    }
    locate(indexer, row, ratio, picked, select_top(scores, count, m_.index_topk, order, picked));
}

// From entry numbers to rows of the cache.
void Backbone::locate(const Indexer& indexer, int row, int ratio, const int32_t* entries, int count) {
    const Slice& s = w_.slices[w_.owner.get(0)[row]];
    const int per_block = m_.block_size / ratio;
    const float** keys = w_.picks.keys.get(0) + int64_t(row) * w_.picks.stride;
    w_.picks.counts.get(0)[row] = count;
    for (int i = 0; i < count; ++i) {
        const int64_t place = s.blocks[entries[i] / per_block] * m_.kv_stride + indexer.kv_offset + entries[i] % per_block;
        keys[i] = m_.kv_rows + place * m_.head_dim;
    }
    std::copy(entries, entries + count, w_.picks.entries.get(0) + int64_t(row) * w_.picks.stride);
}

// Keys of the window that a row sees: those of this step beside the ring, older ones from it.
void Backbone::window(const Layer& layer, int row, KeyList& list) const {
    const Slice& s = w_.slices[w_.owner.get(0)[row]];
    const int position = w_.positions.get(0)[row];
    for (int p = std::max({0, position - m_.window + 1, rect(s), s.floor}); p <= position; ++p) {
        list.add(p >= s.first() ? w_.key.get(0) + int64_t(s.row + p - s.first()) * m_.head_dim : ring_row(layer.ring, s, p), p);
    }
}

void Backbone::attend_window(const Layer& layer) {
    const Picks& p = w_.picks;
    const bool selects = layer.ratio > 0 && p.any;
    finish_attention(layer, m_.window + m_.index_topk, [&](int row, KeyList& list) {
        window(layer, row, list);
        if (!selects) return;
        const int64_t first = int64_t(row) * p.stride;
        for (int i = 0; i < w_.picks.counts.get(0)[row]; ++i) {
            list.add(w_.picks.keys.get(0)[first + i], kEntries + w_.picks.entries.get(0)[first + i]);
        }
    });
    store_keys(layer.ring, w_.key.get(0));
}

// A chunk may be longer than the ring: only its last keys are stored, after all rows have read what they overwrite.
void Backbone::store_keys(float* ring, const float* key) {
    for (const Slice& s : w_.slices) {
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
void Backbone::store_taps() {
    const Draft& draft = *m_.draft;
    const int64_t hidden = m_.hidden, width = draft.main_proj.cols, d = m_.head_dim;
    float* x = w_.hidden.get(size_t(count_) * hidden);
    float* raw = w_.both.get(size_t(count_) * d);
    float* key = w_.key.get(size_t(count_) * d);
    split([&](int from, int to, MemberScratch&) {
        linear(draft.main_proj, w_.taps.get(0) + from * width, width, x + from * hidden, hidden, to - from);
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
}

void Backbone::read_logits(float* logits) {
    const int hidden = m_.hidden;
    int wanted = 0;
    float* x = w_.hidden.get(size_t(count_) * hidden);
    for (const Slice& s : w_.slices) {
        const int first = s.logits == kAll ? s.row : s.row + s.rows - 1;
        for (int r = first; s.logits != kNone && r < s.row + s.rows; ++r) {
            float* row = x + int64_t(wanted++) * hidden;
            collapse(w_.h.get(0) + int64_t(r) * kStreams * hidden, w_.pre.get(0) + r * kStreams, hidden, row);
            rms_norm(row, m_.norm, m_.rms_eps, hidden, row);
        }
    }
    linear(m_.head, x, hidden, logits, m_.vocab, wanted);
}

// ints: number of slices, compact; per slice start, length, slot, floor, rect, logits, number of blocks, the blocks, earlier ids, own ids.
bool read_slices(const Model& model, const int32_t* ints, std::vector<Slice>& slices) {
    const int count = *ints++;
    const bool compact = *ints++ != 0;
    slices.clear();
    for (int i = 0; i < count; ++i) {
        Slice s = {};
        s.start = ints[0];
        s.rows = ints[1];
        s.end = s.start + s.rows;
        s.slot = ints[2];
        s.floor = ints[3];
        s.rect = ints[4];
        s.logits = ints[5];
        s.blocks = ints + 7;
        s.ids = s.blocks + ints[6];
        ints = s.ids + model.ngrams - 1 + s.rows;
        slices.push_back(s);
    }
    return compact;
}

}  // namespace
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
    const bool compact = dix::read_slices(*model, ints, w.slices);
    dix::Backbone(*model, w).run(compact, logits);
}
