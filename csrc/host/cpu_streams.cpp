// Hyper-connections: four residual streams that sublayers read from and write back to.
#include <algorithm>

#include "cpu_ops.h"

namespace dix {
namespace {

// Lane `K` of every group of four.
template <int K>
F16 spread(F16 x) {
    return __builtin_shufflevector(x, x, K, K, K, K, 4 + K, 4 + K, 4 + K, 4 + K, 8 + K, 8 + K, 8 + K, 8 + K, 12 + K, 12 + K, 12 + K, 12 + K);
}

F16 times(const F16* a, F16 x, F16 start) {
    return fma(a[0], spread<0>(x), fma(a[1], spread<1>(x), fma(a[2], spread<2>(x), fma(a[3], spread<3>(x), start))));
}

// Alternating normalisations of four 4x4 matrices side by side, written as diag(1/u) A diag(1/v): with r = 1/u the column step
// A / (sum + eps) is v <- A^T r + eps v, and likewise for rows. rows[j]: row j of each matrix, 4 lanes each.
void sinkhorn(F16* rows, int num_iters, float eps) {
    F16 columns[4];
    for (int k = 0; k < 4; ++k) {
        float out[16];
        for (int i = 0; i < 16; ++i) out[i] = rows[i % 4][i / 4 * 4 + k];
        columns[k] = load<F16>(out);
    }
    F16 u = splat<F16>(1.0f), v = u, r = u, c = u;
    for (int i = 0; i < num_iters; ++i) {
        if (i > 0) {
            u = times(columns, c, u * eps);
            r = 1.0f / u;
        }
        v = times(rows, r, v * eps);
        c = 1.0f / v;
    }
    rows[0] = rows[0] * spread<0>(r) * c;
    rows[1] = rows[1] * spread<1>(r) * c;
    rows[2] = rows[2] * spread<2>(r) * c;
    rows[3] = rows[3] * spread<3>(r) * c;
}

// Up to four rows of raw mixes at once. raw: [count, kMixes], normalised, scaled and shifted.
void split_mixes(const float* raw, int count, const Model& model, float* pre, float* post, float* comb) {
    float lanes[kMixes / kStreams][16] = {};
    for (int r = 0; r < count; ++r) {
        for (int part = 0; part < kMixes / kStreams; ++part) std::memcpy(lanes[part] + 4 * r, raw + r * kMixes + 4 * part, 16);
    }
    const F16 gate = sigmoid(load<F16>(lanes[0])) + model.hc_eps, write = sigmoid(load<F16>(lanes[1])) * 2.0f;
    F16 rows[4];
    for (int j = 0; j < 4; ++j) {
        const F16 x = load<F16>(lanes[2 + j]);
        const F16 top = maximum(maximum(spread<0>(x), spread<1>(x)), maximum(spread<2>(x), spread<3>(x)));
        const F16 e = exponential(x - top);
        rows[j] = e / (spread<0>(e) + spread<1>(e) + spread<2>(e) + spread<3>(e)) + model.hc_eps;
    }
    sinkhorn(rows, model.sinkhorn_iters, model.hc_eps);
    std::memcpy(pre, &gate, count * 16);
    std::memcpy(post, &write, count * 16);
    for (int j = 0; j < 4; ++j) {
        float row[16];
        store(row, rows[j]);
        for (int r = 0; r < count; ++r) std::memcpy(comb + 16 * r + 4 * j, row + 4 * r, 16);
    }
}

}  // namespace

void mixes(const Mix& mix, const Model& model, const float* h, int count, float* scratch, float* pre, float* post, float* comb) {
    const int width = kStreams * model.hidden;
    linear(mix.fn, h, width, scratch, kMixes, count);
    for (int r = 0; r < count; ++r) {
        const float* z = h + int64_t(r) * width;
        const float factor = 1.0f / std::sqrt(dot(z, z, width) / float(width) + model.rms_eps);
        float* raw = scratch + r * kMixes;
        for (int i = 0; i < kMixes; ++i) raw[i] = raw[i] * factor * mix.scale[i] + mix.base[i];
    }
    for (int r = 0; r < count; r += 4) {
        split_mixes(scratch + r * kMixes, std::min(4, count - r), model, pre + 4 * r, post + 4 * r, comb + 16 * r);
    }
}

void collapse(const float* h, const float* pre, int hidden, float* x) {
    for (int c = 0; c < hidden; c += 16) {
        F16 total = load<F16>(h + c) * pre[0];
        for (int i = 1; i < kStreams; ++i) total = fma(load<F16>(h + i * hidden + c), splat<F16>(pre[i]), total);
        store(x + c, total);
    }
}

void read_streams(const float* h, const float* pre, const float* norm, float eps, int hidden, int count, float* x) {
    for (int r = 0; r < count; ++r) {
        float* row = x + int64_t(r) * hidden;
        collapse(h + int64_t(r) * kStreams * hidden, pre + kStreams * r, hidden, row);
        rms_norm(row, norm, eps, hidden, row);
    }
}

// Stream after stream, products rounded before they are added, the output last: the release's order. Fake-quantised keys that lie on a
// rounding edge follow it.
void write_streams(float* h, const float* y, const float* post, const float* comb, int hidden, int count) {
    for (int r = 0; r < count; ++r) {
        float* streams = h + int64_t(r) * kStreams * hidden;
        const float* own = comb + 16 * r;
        for (int c = 0; c < hidden; c += 16) {
            F16 old[kStreams];
            for (int j = 0; j < kStreams; ++j) old[j] = load<F16>(streams + j * hidden + c);
            const F16 out = load<F16>(y + int64_t(r) * hidden + c);
            for (int k = 0; k < kStreams; ++k) {
                F16 total = old[0] * own[k];
                for (int j = 1; j < kStreams; ++j) total = total + old[j] * own[4 * j + k];
                store(streams + k * hidden + c, total + out * post[kStreams * r + k]);
            }
        }
    }
}

}  // namespace dix
