// N-gram tables: the last tokens of a position are hashed to table rows, whose values are added to the streams behind a gate.
#include <algorithm>

#include "cpu_ops.h"

namespace dix {
namespace {

constexpr int32_t kDead = -1;  // positions before the sequence; everything older than one is blocked as well
constexpr int kScaleGroup = 32;

float e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15;
    const float size = exponent ? std::ldexp(1.0f + (code & 7) / 8.0f, exponent - 7) : std::ldexp(float(code & 7), -9);
    return code & 0x80 ? -size : size;
}

// What codes and scales stand for. Products of both are rounded once, as fp32.
struct Tables {
    double values[256], scales[256];
    Tables() {
        for (int i = 0; i < 256; ++i) {
            values[i] = e4m3(uint8_t(i));
            scales[i] = std::ldexp(1.0, i - 127);
        }
    }
};

void decode_row(const Engram& e, int64_t row, int dim, float* out) {
    static const Tables tables;
    if (e.format == 2) {
        std::memcpy(out, static_cast<const float*>(e.table) + row * dim, dim * sizeof(float));
    } else if (e.format == 1) {
        const uint16_t* values = static_cast<const uint16_t*>(e.table) + row * dim;
        for (int i = 0; i < dim; ++i) {
            const uint32_t bits = uint32_t(values[i]) << 16;
            std::memcpy(out + i, &bits, 4);
        }
    } else {
        const uint8_t* codes = static_cast<const uint8_t*>(e.table) + row * dim;
        const uint8_t* scale = e.scale + row * (dim / kScaleGroup);
        for (int i = 0; i < dim; ++i) out[i] = float(tables.values[codes[i]] * tables.scales[scale[i / kScaleGroup]]);
    }
}

}  // namespace

void engram_lookup(const Engram& e, const Model& model, const int32_t* grams, float* values) {
    const int heads = model.engram_columns / (model.ngrams - 1);
    bool blocked = false;
    uint64_t key = 0;
    for (int n = 0; n < model.ngrams; ++n) {
        blocked = blocked || grams[n] == kDead;
        key ^= uint64_t(blocked ? e.pad_id : grams[n]) * uint64_t(e.multipliers[n]);
        if (n == 0) continue;
        for (int head = 0; head < heads; ++head) {
            const int column = (n - 1) * heads + head;
            const int64_t row = int64_t(key) % e.primes[column] + e.offsets[column];
            decode_row(e, row, model.engram_dim, values + column * model.engram_dim);
        }
    }
}

void engram_gate(const Engram& e, const Model& model, const float* kv, float* h) {
    const int hidden = model.hidden;
    const float* value = kv + kStreams * hidden;
    for (int i = 0; i < kStreams; ++i) {
        float* stream = h + i * hidden;
        const float *key = kv + i * hidden, *weight = e.weight + i * hidden;
        F16 match = {};
        for (int c = 0; c < hidden; c += 16) match = fma(load<F16>(stream + c) * load<F16>(weight + c), load<F16>(key + c), match);
        const float own = 1.0f / std::sqrt(dot(stream, stream, hidden) / float(hidden) + model.rms_eps);
        const float other = 1.0f / std::sqrt(dot(key, key, hidden) / float(hidden) + model.rms_eps);
        const float score = sum(match) * (own * other) / std::sqrt(float(hidden));
        const float root = std::copysign(std::sqrt(std::max(std::fabs(score), 1e-6f)), score);
        const F16 gate = splat<F16>(1.0f / (1.0f + std::exp(-root)));
        for (int c = 0; c < hidden; c += 16) store(stream + c, fma(gate, load<F16>(value + c), load<F16>(stream + c)));
    }
}

}  // namespace dix
