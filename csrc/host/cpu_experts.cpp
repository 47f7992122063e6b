// Mixture of experts: router, routed experts over rows grouped by expert, and the shared expert as one more choice of every row.
#include <algorithm>

#include "cpu_ops.h"

namespace dix {
namespace {

// Choices of one row: the best biased scores, weighed by the unbiased ones; ties go to the lower expert.
void choose(const float* logits, const Experts& e, const Model& model, int32_t* ids, float* weights) {
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

void route(const Experts& e, const Model& model, const float* x, int count, ExpertScratch& scratch, int32_t* ids, float* weights) {
    float* logits = scratch.logits.get(size_t(count) * e.count);
    linear(e.gate, x, model.hidden, logits, e.count, count);
    for (int r = 0; r < count; ++r) choose(logits + r * e.count, e, model, ids + r * e.chosen, weights + r * e.chosen);
}

void expert_parts(const Experts& e, const Model& model, const float* x, int count, int choices, const int32_t* ids, const float* weights,
                  ExpertScratch& scratch, float* out) {
    const int total = count * choices, hidden = model.hidden, inner = model.inner;
    float* gathered = scratch.gathered.get(size_t(count) * hidden);  // a row chooses an expert at most once
    float* both = scratch.both.get(size_t(count) * 2 * inner);
    float* act = scratch.act.get(size_t(count) * inner);
    float* part = gathered;  // the inputs are used up when the second product starts
    int32_t* order = scratch.order.get(count);
    for (int i = 0; i < total; ++i) {
        if (ids[i] < 0) std::memset(out + int64_t(i) * hidden, 0, hidden * sizeof(float));
    }
    for (int expert = 0; expert <= e.held; ++expert) {
        int rows = 0;
        for (int i = 0; i < total; ++i) {
            if (ids[i] == expert) order[rows++] = i;
        }
        if (rows == 0) continue;
        for (int i = 0; i < rows; ++i) std::memcpy(gathered + int64_t(i) * hidden, x + int64_t(order[i] / choices) * hidden, hidden * sizeof(float));
        const bool shared = expert == e.held;
        linear(shared ? e.shared_w13 : e.w13, shared ? 0 : expert, gathered, hidden, both, 2 * inner, rows);
        for (int i = 0; i < rows; ++i) activate(both + int64_t(i) * 2 * inner, inner, model.swiglu_limit, weights[order[i]], act + int64_t(i) * inner);
        linear(shared ? e.shared_w2 : e.w2, shared ? 0 : expert, act, inner, part, hidden, rows);
        for (int i = 0; i < rows; ++i) std::memcpy(out + int64_t(order[i]) * hidden, part + int64_t(i) * hidden, hidden * sizeof(float));
    }
}

void experts(const Experts& e, const Model& model, const float* x, int count, ExpertScratch& scratch, float* y) {
    const int choices = e.chosen + 1, total = count * choices, hidden = model.hidden;
    float* weights = scratch.weights.get(total);
    int32_t* ids = scratch.ids.get(total);
    route(e, model, x, count, scratch, ids, weights);
    // Make room for the shared expert behind the choices of each row, from the last row on.
    for (int r = count - 1; r >= 0; --r) {
        for (int k = e.chosen - 1; k >= 0; --k) {
            ids[r * choices + k] = ids[r * e.chosen + k];
            weights[r * choices + k] = weights[r * e.chosen + k];
        }
        ids[r * choices + e.chosen] = e.held;
        weights[r * choices + e.chosen] = 1.0f;
    }
    float* out = scratch.out.get(size_t(total) * hidden);
    expert_parts(e, model, x, count, choices, ids, weights, scratch, out);
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

// For the exchange between ranks, layer by layer; ids and slots are 64-bit there.
extern "C" void dix_route(const dix::Model* model, dix::ExpertScratch* scratch, int layer, const float* x, int count, int64_t* ids, float* weights) {
    const dix::Experts& e = model->layers[layer].experts;
    int32_t* found = scratch->ids.get(size_t(count) * e.chosen);
    dix::route(e, *model, x, count, *scratch, found, weights);
    std::copy(found, found + size_t(count) * e.chosen, ids);
}

// parts: [count, choices, C].
extern "C" void dix_expert_parts(const dix::Model* model, dix::ExpertScratch* scratch, int layer, const float* x, int count, int choices,
                                 const int64_t* slots, const float* weights, float* parts) {
    int32_t* ids = scratch->ids.get(size_t(count) * choices);
    std::copy(slots, slots + size_t(count) * choices, ids);
    dix::expert_parts(model->layers[layer].experts, *model, x, count, choices, ids, weights, *scratch, parts);
}

extern "C" dix::ExpertScratch* dix_open_experts() { return new dix::ExpertScratch; }

extern "C" void dix_close_experts(dix::ExpertScratch* scratch) { delete scratch; }
