// Normalisation, rotation and storage round trips of single vectors.
#include <algorithm>

#include "cpu_ops.h"

namespace dix {
namespace {

constexpr int kGroup = 32, kKvGroup = 16;

// Smallest power of two >= x, x a positive normal number.
float ceil_power_of_two(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
    bits <<= 23;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Nearest E4M3 value, ties to even; |x| is at most 448.
float round_e4m3(float x) {
    if (std::fabs(x) < 0.015625f) return std::nearbyint(x * 512.0f) / 512.0f;  // subnormals step by 2^-9
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits += 0x7FFFF + ((bits >> 20) & 1);
    bits &= 0xFFF00000u;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Nearest E2M1 value, ties to even, saturating at 6.
float round_e2m1(float x) {
    const float size = std::min(std::fabs(x), 6.0f);
    // The grid steps by 0.5 up to 2, by 1 up to 4, by 2 up to 6.
    const float step = size < 2.0f ? 0.5f : size < 4.0f ? 1.0f : 2.0f;
    return std::copysign(std::nearbyint(size / step) * step, x);
}

float largest(const float* x, int n) {
    float amax = 0.0f;
    for (int i = 0; i < n; ++i) amax = std::max(amax, std::fabs(x[i]));
    return amax;
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
    const float factor = 1.0f / std::sqrt(dot(x, x, n) / float(n) + eps);
    for (int i = 0; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

void rotation(int64_t position, const float* frequencies, int half, float* table) {
    for (int i = 0; i < half; ++i) {
        const float angle = float(position) * frequencies[i];
        table[i] = std::cos(angle);
        table[half + i] = std::sin(angle);
    }
}

void rotate(float* x, const float* table, int half, float direction) {
    for (int i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1], c = table[i], s = direction * table[half + i];
        x[2 * i] = a * c - b * s;
        x[2 * i + 1] = a * s + b * c;
    }
}

void rotate_lanes(float* x, const float* table, int half) {
    for (int i = 0; i < half; ++i) {
        float* pair = x + 2 * i * kLanes;
        const F8 a = load<F8>(pair), b = load<F8>(pair + kLanes);
        store(pair, a * table[i] - b * table[half + i]);
        store(pair + kLanes, a * table[half + i] + b * table[i]);
    }
}

void q8(float* x, int n) {
    for (int g = 0; g < n; g += kGroup) {
        const float scale = ceil_power_of_two(std::max(largest(x + g, kGroup), 1e-4f) * (1.0f / 448.0f));
        for (int i = g; i < g + kGroup; ++i) x[i] = round_e4m3(std::clamp(x[i] / scale, -448.0f, 448.0f)) * scale;
    }
}

void q4_index(float* x, int n) {
    for (int g = 0; g < n; g += kGroup) {
        const float scale = ceil_power_of_two(std::max(largest(x + g, kGroup), 6.0f * 0x1p-126f) * (1.0f / 6.0f));
        for (int i = g; i < g + kGroup; ++i) x[i] = round_e2m1(x[i] / scale) * scale;
    }
}

void q4_index_lanes(float* x, int n) {
    float group[kGroup];
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int g = 0; g < n; g += kGroup) {
            for (int i = 0; i < kGroup; ++i) group[i] = x[(g + i) * kLanes + lane];
            q4_index(group, kGroup);
            for (int i = 0; i < kGroup; ++i) x[(g + i) * kLanes + lane] = group[i];
        }
    }
}

void q4_kv(float* x, int n) {
    for (int g = 0; g < n; g += kKvGroup) {
        const float scale = round_e4m3(std::min(std::max(largest(x + g, kKvGroup), 6.0f * 0x1p-9f) / 6.0f, 448.0f));
        for (int i = g; i < g + kKvGroup; ++i) x[i] = round_e2m1(x[i] / scale) * scale;
    }
}

}  // namespace dix
