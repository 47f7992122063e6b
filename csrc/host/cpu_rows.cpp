// The parts of a layer that the backbone and the draft stages share.
#include <algorithm>

#include "cpu_step.h"

namespace dix {

void Rows::place() {
    count_ = 0;
    for (Slice& s : w_.slices) {
        s.row = count_;
        count_ += s.rows;
    }
    int32_t* positions = w_.positions.get(count_);
    int32_t* owner = w_.owner.get(count_);
    float* plain = w_.plain.get(size_t(count_) * m_.rope_dim);
    float* scaled = w_.scaled.get(size_t(count_) * m_.rope_dim);
    for (size_t i = 0; i < w_.slices.size(); ++i) {
        const Slice& s = w_.slices[i];
        for (int r = s.row; r < s.row + s.rows; ++r) {
            positions[r] = s.first() + r - s.row;
            owner[r] = int32_t(i);
            rotation(positions[r], m_.plain_frequencies, m_.rope_dim / 2, plain + int64_t(r) * m_.rope_dim);
            rotation(positions[r], m_.scaled_frequencies, m_.rope_dim / 2, scaled + int64_t(r) * m_.rope_dim);
        }
    }
}

void Rows::embed(const int32_t* ids) {
    float* h = w_.h.get(size_t(count_) * kStreams * m_.hidden);
    float* pre = w_.pre.get(size_t(count_) * kStreams);
    for (int r = 0; r < count_; ++r) {
        for (int i = 0; i < kStreams; ++i) {
            std::memcpy(h + (int64_t(r) * kStreams + i) * m_.hidden, m_.embed + int64_t(ids[r]) * m_.hidden, m_.hidden * sizeof(float));
            pre[r * kStreams + i] = i == 0 ? 1.0f : 0.0f;
        }
    }
}

// The layer's input: streams weighted by the previous sublayer's mixes.
void Rows::read_input(const Layer& layer, int from, int to) {
    const int64_t hidden = m_.hidden;
    read_streams(w_.h.get(0) + from * kStreams * hidden, w_.pre.get(0) + from * kStreams, layer.attn_norm, m_.rms_eps, m_.hidden, to - from,
                 w_.x.get(size_t(count_) * hidden) + from * hidden);
}

void Rows::begin_attention(const Layer& layer) {
    const size_t n = size_t(count_) * kStreams;
    float *h = w_.h.get(0), *raw = w_.raw.get(size_t(count_) * kMixes), *next = w_.next_pre.get(n), *post = w_.post.get(n), *comb = w_.comb.get(4 * n);
    w_.x.get(size_t(count_) * m_.hidden);
    w_.both.get(size_t(count_) * (m_.q_rank + m_.head_dim));
    w_.latent.get(size_t(count_) * m_.q_rank);
    w_.key.get(size_t(count_) * m_.head_dim);
    split([&](int from, int to, MemberScratch&) {
        const int64_t at = int64_t(from) * kStreams;
        mixes(layer.attn_mix, m_, h + at * m_.hidden, to - from, raw + int64_t(from) * kMixes, next + at, post + at, comb + 4 * at);
        read_input(layer, from, to);
        project(layer, from, to);
    });
}

void Rows::window_key(const float* raw, const Attention& attention, const float* table, float* key) const {
    rms_norm(raw, attention.kv_norm, m_.rms_eps, m_.head_dim, key);
    rotate(key + m_.head_dim - m_.rope_dim, table, m_.rope_dim / 2, 1.0f);
    if (m_.quantize_kv) q8(key, m_.head_dim);
}

void Rows::project(const Layer& layer, int from, int to) {
    const Attention& a = layer.attention;
    const int64_t width = m_.q_rank + m_.head_dim;
    float *both = w_.both.get(0), *latent = w_.latent.get(0), *key = w_.key.get(0);
    linear(a.wq_a_wkv, w_.x.get(0) + int64_t(from) * m_.hidden, m_.hidden, both + from * width, width, to - from);
    for (int r = from; r < to; ++r) {
        const float* row = both + r * width;
        rms_norm(row, a.q_norm, m_.rms_eps, m_.q_rank, latent + int64_t(r) * m_.q_rank);
        window_key(row + m_.q_rank, a, table(layer, r), key + int64_t(r) * m_.head_dim);
    }
}

// The input is read with the attention's weights; this sublayer's own serve the next one.
void Rows::read_ffn_input(const Layer& layer, int from, int to) {
    const int64_t at = int64_t(from) * kStreams;
    float* h = w_.h.get(0) + at * m_.hidden;
    mixes(layer.ffn_mix, m_, h, to - from, w_.raw.get(0) + int64_t(from) * kMixes, w_.pre.get(0) + at, w_.post.get(0) + at, w_.comb.get(0) + 4 * at);
    read_streams(h, w_.next_pre.get(0) + at, layer.ffn_norm, m_.rms_eps, m_.hidden, to - from, w_.x.get(0) + int64_t(from) * m_.hidden);
}

// A sublayer's output into the streams.
void Rows::write(int from, int to) {
    const int64_t at = int64_t(from) * kStreams;
    write_streams(w_.h.get(0) + at * m_.hidden, w_.y.get(0) + int64_t(from) * m_.hidden, w_.post.get(0) + at, w_.comb.get(0) + 4 * at, m_.hidden, to - from);
}

void Rows::feed_forward(const Layer& layer) {
    float *x = w_.x.get(0), *y = w_.y.get(0);
    if (layer.experts.layer >= 0) {
        read_ffn_input(layer, 0, count_);
        m_.exchange(layer.experts.layer, x, count_, y);
        return write(0, count_);
    }
    split([&](int from, int to, MemberScratch& own) {
        read_ffn_input(layer, from, to);
        experts(layer.experts, m_, x + int64_t(from) * m_.hidden, to - from, own.experts, y + int64_t(from) * m_.hidden);
        write(from, to);
    });
}

}  // namespace dix
