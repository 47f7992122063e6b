// Mixture of experts: router, routed experts over rows grouped by expert, and the shared expert as one more choice of every row.
#include <algorithm>

#include "cpu_ops.h"

namespace dix {
namespace {

// Choices of one row: the best biased scores, weighed by the unbiased ones; ties go to the lower expert.
void route(const float* logits, const Experts& e, const Model& model, int32_t* ids, float* weights) {
    float scores[1024];
    for (int i = 0; i < e.count; ++i) {
        const float x = logits[i] / model.gate_temperature;
        scores[i] = std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x)));
    }
    float total = 0.0f;
    for (int k = 0; k < e.chosen; ++k) {
        int best = -1;
        for (int i = 0; i < e.count; ++i) {
            if (std::find(ids, ids + k, i) != ids + k) continue;
            if (best < 0 || scores[i] + e.bias[i] > scores[best] + e.bias[best]) best = i;
        }
        ids[k] = best;
        weights[k] = scores[best];
        total += scores[best];
    }
    for (int k = 0; k < e.chosen; ++k) weights[k] *= model.routed_scale / (total + 1e-20f);
    ids[e.chosen] = e.count;
    weights[e.chosen] = 1.0f;
}

// silu(min(gate, limit)) * clamp(up, -limit, limit) * weight. both: gate, then up. n is a multiple of 16.
void activate(const float* both, int n, float limit, float weight, float* act) {
    const F16 most = splat<F16>(limit);
    for (int i = 0; i < n; i += 16) {
        const F16 gate = minimum(most, load<F16>(both + i));
        const F16 up = maximum(-most, minimum(most, load<F16>(both + n + i)));
        store(act + i, gate * sigmoid(gate) * up * weight);
    }
}

}  // namespace

void experts(const Experts& e, const Model& model, const float* x, int count, ExpertScratch& scratch, float* y) {
    const int choices = e.chosen + 1, total = count * choices, hidden = model.hidden, inner = model.inner;
    float* logits = scratch.logits.get(size_t(count) * e.count);
    float* weights = scratch.weights.get(total);
    int32_t* ids = scratch.ids.get(total);
    linear(e.gate, x, hidden, logits, e.count, count);
    for (int r = 0; r < count; ++r) route(logits + r * e.count, e, model, ids + r * choices, weights + r * choices);

    float* gathered = scratch.gathered.get(size_t(count) * hidden);
    float* both = scratch.both.get(size_t(count) * 2 * inner);
    float* act = scratch.act.get(size_t(count) * inner);
    float* part = scratch.gathered.get(size_t(count) * hidden);  // the inputs are used up when the second product starts
    float* out = scratch.out.get(size_t(total) * hidden);
    int32_t* order = scratch.order.get(count);
    for (int expert = 0; expert <= e.count; ++expert) {
        int rows = 0;
        for (int i = 0; i < total; ++i) {
            if (ids[i] == expert) order[rows++] = i;
        }
        if (rows == 0) continue;
        for (int i = 0; i < rows; ++i) std::memcpy(gathered + int64_t(i) * hidden, x + int64_t(order[i] / choices) * hidden, hidden * sizeof(float));
        const bool shared = expert == e.count;
        linear(shared ? e.shared_w13 : e.w13, shared ? 0 : expert, gathered, hidden, both, 2 * inner, rows);
        for (int i = 0; i < rows; ++i) activate(both + int64_t(i) * 2 * inner, inner, model.swiglu_limit, weights[order[i]], act + int64_t(i) * inner);
        linear(shared ? e.shared_w2 : e.w2, shared ? 0 : expert, act, inner, part, hidden, rows);
        for (int i = 0; i < rows; ++i) std::memcpy(out + int64_t(order[i]) * hidden, part + int64_t(i) * hidden, hidden * sizeof(float));
    }
    for (int r = 0; r < count; ++r) {
        const float* parts = out + int64_t(r) * choices * hidden;
        float* row = y + int64_t(r) * hidden;
        std::memcpy(row, parts, hidden * sizeof(float));
        for (int k = 1; k < choices; ++k) {
            for (int c = 0; c < hidden; ++c) row[c] += parts[k * hidden + c];
        }
    }
}

}  // namespace dix
