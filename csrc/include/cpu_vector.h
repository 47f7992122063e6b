// Vectors of 8 and 16 floats in the compiler's own vector types: one source for AVX-512, AVX2 and plain code.
//
// Every sum has a fixed order that depends on sizes only, never on how many rows a step has: a row's result is the same in any batch.
// Products and sums are fused only where `fma` says so; the library is compiled with -ffp-contract=off.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dix {

typedef float F4 __attribute__((vector_size(16)));
typedef float F8 __attribute__((vector_size(32)));
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));

template <class V>
inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline void store(float* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

template <class V>
inline V splat(float x) {
    return x - V{};
}

inline F8 low(F16 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
inline F8 high(F16 x) { return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }
inline F16 join(F8 a, F8 b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// a * b + c, rounded once where the machine can.
inline F8 fma(F8 a, F8 b, F8 c) {
#if defined(__FMA__) && defined(__AVX2__)
    return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline F16 fma(F16 a, F16 b, F16 c) {
#if defined(__AVX512F__)
    return (F16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return join(fma(low(a), low(b), low(c)), fma(high(a), high(b), high(c)));
#endif
}

// NaN in the second argument wins, so that it stays visible.
template <class V>
inline V maximum(V a, V b) {
    return a > b ? a : b;
}

template <class V>
inline V minimum(V a, V b) {
    return a < b ? a : b;
}

inline float sum(F8 x) {
    const F4 a = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
    return (a[0] + a[2]) + (a[1] + a[3]);
}

inline float sum(F16 x) { return sum(low(x) + high(x)); }

// e^x within 2 units of the last place; the result stays a normal number for any x.
inline F16 exponential(F16 x) {
    x = minimum(splat<F16>(88.0f), maximum(splat<F16>(-87.0f), x));
    // The constant pushes the integer part into the low mantissa bits.
    const F16 shift = splat<F16>(12582912.0f);
    const F16 shifted = fma(x, splat<F16>(1.44269504f), shift);
    const F16 whole = shifted - shift;
    F16 r = fma(whole, splat<F16>(-0.693359375f), x);
    r = fma(whole, splat<F16>(2.12194440e-4f), r);
    F16 p = splat<F16>(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = fma(p, r, splat<F16>(c));
    p = fma(p * r, r, r) + 1.0f;
    const I16 power = ((I16)shifted - 0x4B400000 + 127) << 23;
    return p * (F16)power;
}

inline F16 sigmoid(F16 x) { return 1.0f / (1.0f + exponential(-x)); }

// Sum of x[i] * y[i] in sixteen running sums. n is a multiple of 16.
inline float dot(const float* x, const float* y, int n) {
    F16 total = {};
    for (int i = 0; i < n; i += 16) total = fma(load<F16>(x + i), load<F16>(y + i), total);
    return sum(total);
}

}  // namespace dix
