// Products of rows with packed matrices.
//
// Layout: outputs in tiles of 16, tiles in groups of four (the last group may be smaller); a group runs through the inputs in pieces of a
// few pairs, for each piece its tiles one after the other. A bf16 pair is one 32-bit lane, so that a shift and a mask make two vectors of
// fp32 weights; four pairs of fp4 codes are one lane behind sixteen scales. Values and sums are the same in every format: an output is the
// sum over even inputs plus the sum over odd inputs, both in ascending order, for any number of rows.
#include <sys/mman.h>

#include <algorithm>

#include "cpu_ops.h"

namespace dix {
namespace {

constexpr int kTile = 16;
constexpr int kGroup = 4;
// Bytes between a weight and the one that is fetched meanwhile. A step reads more weights than the second-level cache holds, and the
// hardware's own fetches stop at every page. Behind the last weight the address belongs to the next matrix, or to nobody.
constexpr int64_t kAhead = 4096;
// Rows and tiles whose running sums fit the registers together.
#if defined(__AVX512F__)
constexpr int kRows = 6, kTiles = 2;
#else
constexpr int kRows = 2, kTiles = 1;
#endif

// A format reads pair `i` of a tile's piece, and packs a piece of kTile outputs; from[k * kTile + output].
struct Bf16 {
    static constexpr int kPairs = 1, kBytes = 64;
    explicit Bf16(const char* piece) : both(load<U16>(piece)) {}
    void read(int, F16& even, F16& odd) const {
        even = (F16)(both << 16);
        odd = (F16)(both & 0xFFFF0000u);
    }
    static void pack(const float* from, char* to) {
        const U16 even = load<U16>(from), odd = load<U16>(from + kTile);
        store(reinterpret_cast<float*>(to), (F16)((even >> 16) | (odd & 0xFFFF0000u)));
    }
    U16 both;
};

struct Fp32 {
    static constexpr int kPairs = 1, kBytes = 128;
    explicit Fp32(const char* piece) : at(piece) {}
    void read(int, F16& even, F16& odd) const {
        even = load<F16>(at);
        odd = load<F16>(at + 64);
    }
    static void pack(const float* from, char* to) { std::memcpy(to, from, kBytes); }
    const char* at;
};

constexpr float kE2m1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
// Code of half an integer by twice its size, -1 for those that are no E2M1 value.
constexpr int8_t kE2m1Codes[13] = {0, 1, 2, 3, 4, -1, 5, -1, 6, -1, -1, -1, 7};

// Code of a size that is `inverse` times an E2M1 value, -1 when it is none. inverse: a power of two; the product is below 8.
int e2m1_code(float size, float inverse) {
    const float twice = 2.0f * size * inverse;
    const int whole = int(twice);
    return whole <= 12 && float(whole) == twice ? kE2m1Codes[whole] : -1;
}

// The power of two below which `count` values at a stride are E2M1 codes, as a biased exponent; 0 when there is none.
int e2m1_scale(const float* from, int count, int stride) {
    float most = 0.0f;
    for (int i = 0; i < count; ++i) most = std::max(most, std::fabs(from[i * stride]));
    uint32_t bits;
    std::memcpy(&bits, &most, 4);
    // The largest code is 4 or 6. Infinities and the last few exponents are left to wider formats.
    const int exponent = most == 0.0f ? 127 : int(bits >> 23) - 2;
    if (exponent < 1 || exponent > 250) return 0;
    const float inverse = std::ldexp(1.0f, 127 - exponent);
    for (int i = 0; i < count; ++i) {
        if (e2m1_code(std::fabs(from[i * stride]), inverse) < 0) return 0;
    }
    return exponent;
}

#if defined(__AVX512F__)
struct Fp4 {
    static constexpr int kPairs = 4, kBytes = 80;
    explicit Fp4(const char* piece)
        : codes(load<U16>(piece + kTile)), scale((F16)(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)piece)), 23))) {}
    void read(int i, F16& even, F16& odd) const {
        const __m512 values = (__m512)load<F16>(kE2m1);
        const U16 shifted = codes >> (8 * i);
        even = (F16)_mm512_permutexvar_ps((__m512i)shifted, values) * scale;
        odd = (F16)_mm512_permutexvar_ps((__m512i)(shifted >> 4), values) * scale;
    }
    static void pack(const float* from, char* to) {
        for (int output = 0; output < kTile; ++output) {
            const int exponent = e2m1_scale(from + output, 2 * kPairs, kTile);
            const float inverse = std::ldexp(1.0f, 127 - exponent);
            uint32_t lane = 0;
            for (int k = 0; k < 2 * kPairs; ++k) {
                const float value = from[k * kTile + output];
                const uint32_t code = uint32_t(e2m1_code(std::fabs(value), inverse));
                lane |= (code | (std::signbit(value) ? 8u : 0u)) << (4 * k);
            }
            to[output] = char(exponent);
            std::memcpy(to + kTile + 4 * output, &lane, 4);
        }
    }
    U16 codes;
    F16 scale;
};
#endif

void store_part(float* y, F16 value, int count) {
    if (count >= kTile) {
        store(y, value);
    } else {
        std::memcpy(y, &value, count * sizeof(float));
    }
}

// TILES x ROWS outputs. w: this group at the first of the tiles; step: bytes from piece to piece; outputs: how many exist from y on.
template <class W, int TILES, int ROWS>
void product(const char* w, int64_t step, int pieces, const float* x, int64_t ldx, float* y, int64_t ldy, int outputs) {
    // Unrolled to the end: sums that a loop indexes would live in memory, and filling and reading them takes as long as many products.
    F16 even[ROWS][TILES], odd[ROWS][TILES];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int t = 0; t < TILES; ++t) even[r][t] = odd[r][t] = F16{};
    }
    for (int p = 0; p < pieces; ++p) {
        for (int at = 0; at < TILES * W::kBytes; at += 64) __builtin_prefetch(w + p * step + kAhead + at);
        const auto piece = [&](int t) { return W(w + p * step + t * W::kBytes); };
        for (int i = 0; i < W::kPairs; ++i) {
            const float* input = x + 2 * (p * W::kPairs + i);
            F16 a[TILES], b[TILES];
            for (int t = 0; t < TILES; ++t) piece(t).read(i, a[t], b[t]);
            for (int r = 0; r < ROWS; ++r) {
                const F16 first = splat<F16>(input[r * ldx]), second = splat<F16>(input[r * ldx + 1]);
                for (int t = 0; t < TILES; ++t) {
                    even[r][t] = fma(a[t], first, even[r][t]);
                    odd[r][t] = fma(b[t], second, odd[r][t]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int t = 0; t < TILES; ++t) {
            if (outputs > t * kTile) store_part(y + r * ldy + t * kTile, even[r][t] + odd[r][t], outputs - t * kTile);
        }
    }
}

template <class W, int TILES, int ROWS = kRows>
void some_rows(int rows, const char* w, int64_t step, int pieces, const float* x, int64_t ldx, float* y, int64_t ldy, int outputs) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return product<W, TILES, ROWS>(w, step, pieces, x, ldx, y, ldy, outputs);
        some_rows<W, TILES, ROWS - 1>(rows, w, step, pieces, x, ldx, y, ldy, outputs);
    }
}

// One row against a whole group: enough independent sums to hide the latency of an fma.
template <class W>
void one_row(int tiles, const char* w, int pieces, const float* x, float* y, int outputs) {
    const int64_t step = int64_t(tiles) * W::kBytes;
    switch (tiles) {
        case 1: return product<W, 1, 1>(w, step, pieces, x, 0, y, 0, outputs);
        case 2: return product<W, 2, 1>(w, step, pieces, x, 0, y, 0, outputs);
        case 3: return product<W, 3, 1>(w, step, pieces, x, 0, y, 0, outputs);
        default: return product<W, 4, 1>(w, step, pieces, x, 0, y, 0, outputs);
    }
}

template <class W>
void run(const Matrix& m, const char* data, const float* x, int64_t ldx, float* y, int64_t ldy, int count) {
    const int all = (m.rows + kTile - 1) / kTile, pieces = m.cols / (2 * W::kPairs);
    for (int tile = 0; tile < all; tile += kGroup) {
        const int tiles = std::min(kGroup, all - tile);
        const char* w = data + int64_t(tile) * pieces * W::kBytes;
        const int outputs = m.rows - tile * kTile;
        if (count == 1) {
            one_row<W>(tiles, w, pieces, x, y + tile * kTile, outputs);
            continue;
        }
        const int64_t step = int64_t(tiles) * W::kBytes;
        for (int r = 0; r < count; r += kRows) {
            const int rows = std::min(kRows, count - r);
            int t = 0;
            for (; t + kTiles <= tiles; t += kTiles) {
                some_rows<W, kTiles>(rows, w + t * W::kBytes, step, pieces, x + r * ldx, ldx, y + r * ldy + (tile + t) * kTile, ldy, outputs - t * kTile);
            }
            for (; t < tiles; ++t) {
                some_rows<W, 1>(rows, w + t * W::kBytes, step, pieces, x + r * ldx, ldx, y + r * ldy + (tile + t) * kTile, ldy, outputs - t * kTile);
            }
        }
    }
}

template <class W>
void pack(const float* from, int rows, int cols, char* to) {
    const std::vector<float> nothing(cols);
    const int all = (rows + kTile - 1) / kTile, inputs = 2 * W::kPairs;
    float piece[2 * W::kPairs * kTile];
    for (int tile = 0; tile < all; tile += kGroup) {
        const int tiles = std::min(kGroup, all - tile);
        for (int first = 0; first < cols; first += inputs) {
            for (int t = 0; t < tiles; ++t) {
                for (int i = 0; i < kTile; ++i) {
                    const int row = (tile + t) * kTile + i;
                    const float* values = (row < rows ? from + int64_t(row) * cols : nothing.data()) + first;
                    for (int k = 0; k < inputs; ++k) piece[k * kTile + i] = values[k];
                }
                W::pack(piece, to);
                to += W::kBytes;
            }
        }
    }
}

// Call `use` with the class of a format.
template <class Use>
void with_format(int format, Use use) {
    if (format == 0) return use.template operator()<Bf16>();
#if defined(__AVX512F__)
    if (format == 2) return use.template operator()<Fp4>();
#endif
    use.template operator()<Fp32>();
}

}  // namespace

void linear(const Matrix& w, const float* x, int64_t ldx, float* y, int64_t ldy, int count) { linear(w, 0, x, ldx, y, ldy, count); }

void linear(const Matrix& first, int index, const float* x, int64_t ldx, float* y, int64_t ldy, int count) {
    const char* data = first.data + index * first.bytes;
    with_format(first.format, [&]<class W>() { run<W>(first, data, x, ldx, y, ldy, count); });
}

}  // namespace dix

// Ask for large pages behind `bytes` at `data`, which then need few address translations. Only advice.
extern "C" void dix_large_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    madvise(data, size_t(bytes), MADV_HUGEPAGE);
#endif
}

extern "C" int64_t dix_packed_bytes(int rows, int cols, int format) {
    int64_t bytes = 0;
    dix::with_format(format, [&]<class W>() { bytes = int64_t((rows + dix::kTile - 1) / dix::kTile) * (cols / (2 * W::kPairs)) * W::kBytes; });
    return bytes;
}

// The smallest format that holds `count` fp32 values exactly, rows of a multiple of 8: 2 fp4, 0 bf16, 1 fp32.
extern "C" int dix_format(const float* from, int64_t count) {
#if defined(__AVX512F__)
    int64_t i = 0;
    while (i < count && dix::e2m1_scale(from + i, 8, 1) > 0) i += 8;
    if (i >= count) return 2;
#endif
    for (int64_t i = 0; i < count;) {
        uint32_t rest = 0;
        for (const int64_t end = std::min(count, i + 4096); i < end; ++i) {
            uint32_t bits;
            std::memcpy(&bits, from + i, 4);
            rest |= bits & 0xFFFF;
        }
        if (rest) return 1;
    }
    return 0;
}

// from: fp32 [count, rows, cols] that `format` holds exactly. to: `count` packed matrices.
extern "C" void dix_pack(const float* from, int count, int rows, int cols, int format, char* to) {
    for (int i = 0; i < count; ++i) {
        const float* source = from + int64_t(i) * rows * cols;
        char* target = to + i * dix_packed_bytes(rows, cols, format);
        dix::with_format(format, [&]<class W>() { dix::pack<W>(source, rows, cols, target); });
    }
}
