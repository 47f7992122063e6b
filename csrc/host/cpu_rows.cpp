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

void Rows::read_input(const Layer& layer, const float* pre) {
    read_streams(w_.h.get(0), pre, layer.attn_norm, m_.rms_eps, m_.hidden, count_, w_.x.get(size_t(count_) * m_.hidden));
}

void Rows::begin_attention(const Layer& layer) {
    const size_t n = size_t(count_) * kStreams;
    mixes(layer.attn_mix, m_, w_.h.get(0), count_, w_.raw.get(size_t(count_) * kMixes), w_.next_pre.get(n), w_.post.get(n), w_.comb.get(4 * n));
    read_input(layer, w_.pre.get(0));
    project(layer);
}

void Rows::window_key(const float* raw, const Attention& attention, const float* table, float* key) const {
    rms_norm(raw, attention.kv_norm, m_.rms_eps, m_.head_dim, key);
    rotate(key + m_.head_dim - m_.rope_dim, table, m_.rope_dim / 2, 1.0f);
    if (m_.quantize_kv) q8(key, m_.head_dim);
}

void Rows::project(const Layer& layer) {
    const Attention& a = layer.attention;
    const int width = m_.q_rank + m_.head_dim;
    float* both = w_.both.get(size_t(count_) * width);
    float* latent = w_.latent.get(size_t(count_) * m_.q_rank);
    float* key = w_.key.get(size_t(count_) * m_.head_dim);
    linear(a.wq_a_wkv, w_.x.get(0), m_.hidden, both, width, count_);
    for (int r = 0; r < count_; ++r) {
        const float* row = both + int64_t(r) * width;
        rms_norm(row, a.q_norm, m_.rms_eps, m_.q_rank, latent + int64_t(r) * m_.q_rank);
        window_key(row + m_.q_rank, a, table(layer, r), key + int64_t(r) * m_.head_dim);
    }
}

void Rows::feed_forward(const Layer& layer) {
    float *h = w_.h.get(0), *x = w_.x.get(0), *y = w_.y.get(0), *raw = w_.raw.get(0);
    // The input is read with the attention's weights; this sublayer's own serve the next one.
    mixes(layer.ffn_mix, m_, h, count_, raw, w_.pre.get(0), w_.post.get(0), w_.comb.get(0));
    read_streams(h, w_.next_pre.get(0), layer.ffn_norm, m_.rms_eps, m_.hidden, count_, x);
    if (layer.experts.layer >= 0) {
        m_.exchange(layer.experts.layer, x, count_, y);
    } else {
        experts(layer.experts, m_, x, count_, w_.experts, y);
    }
    write_streams(h, y, w_.post.get(0), w_.comb.get(0), m_.hidden, count_);
}

}  // namespace dix
