// Which compressed entries the rows of a step attend to.
#include <algorithm>

#include "cpu_backbone.h"

namespace dix {

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
    uint32_t* ranks = own.ranks.get(count + 16);
    uint8_t* allowed = p.allowed.get(0) + int64_t(row) * p.blocks;
    if (indexer.publishes && count > m_.candidate_blocks * size) {
        const int blocks = (count + size - 1) / size;
        float* best = own.blocks.get(blocks);
        for (int b = 0; b < blocks; ++b) best[b] = *std::max_element(scores + b * size, scores + std::min(count, (b + 1) * size));
        best[blocks - 1] = INFINITY;  // the newest block is always kept
        const int kept = select_top(best, blocks, m_.candidate_blocks, ranks, picked);
        std::fill_n(allowed, p.blocks, 0);
        for (int i = 0; i < kept; ++i) allowed[picked[i]] = 1;
        p.restricted.get(0)[row] = 1;
    } else if (indexer.restricted && p.restricted.get(0)[row]) {
        for (int i = 0; i < count; ++i) {
            if (!allowed[i / size]) scores[i] = -INFINITY;
        }
    }
    locate(indexer, row, ratio, picked, select_top(scores, count, m_.index_topk, ranks, picked));
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

}  // namespace dix
