// Products of rows with packed matrices.
//
// Layout: outputs in tiles of 16, tiles in groups of four (the last group may be smaller); a group runs through the inputs in pairs, for
// each pair its tiles one after the other. A bf16 pair is one 32-bit lane, so that a shift and a mask make two vectors of fp32 weights.
// An output is the sum over even inputs plus the sum over odd inputs, both in ascending order, for any number of rows.
#include <algorithm>

#include "cpu_ops.h"

namespace dix {
namespace {

constexpr int kTile = 16;
constexpr int kGroup = 4;
// Rows and tiles whose running sums fit the registers together.
#if defined(__AVX512F__)
constexpr int kRows = 6, kTiles = 2;
#else
constexpr int kRows = 2, kTiles = 1;
#endif

struct Bf16 {
    static constexpr int kPair = 64;
    static void read(const char* from, F16& even, F16& odd) {
        const U16 both = load<U16>(from);
        even = (F16)(both << 16);
        odd = (F16)(both & 0xFFFF0000u);
    }
    static void write(char* to, const float* even, const float* odd) {
        for (int i = 0; i < kTile; ++i) {
            uint32_t a, b;
            std::memcpy(&a, even + i, 4);
            std::memcpy(&b, odd + i, 4);
            const uint32_t both = (a >> 16) | (b & 0xFFFF0000u);
            std::memcpy(to + 4 * i, &both, 4);
        }
    }
};

struct Fp32 {
    static constexpr int kPair = 128;
    static void read(const char* from, F16& even, F16& odd) {
        even = load<F16>(from);
        odd = load<F16>(from + 64);
    }
    static void write(char* to, const float* even, const float* odd) {
        std::memcpy(to, even, 64);
        std::memcpy(to + 64, odd, 64);
    }
};

void store_part(float* y, F16 value, int count) {
    if (count >= kTile) {
        store(y, value);
    } else {
        std::memcpy(y, &value, count * sizeof(float));
    }
}

// TILES x ROWS outputs. w: this group at the first of the tiles; step: bytes from pair to pair; outputs: how many exist from y on.
template <class W, int TILES, int ROWS>
void product(const char* w, int64_t step, int pairs, const float* x, int64_t ldx, float* y, int64_t ldy, int outputs) {
    F16 even[ROWS][TILES] = {}, odd[ROWS][TILES] = {};
    for (int p = 0; p < pairs; ++p) {
        F16 a[TILES], b[TILES];
        for (int t = 0; t < TILES; ++t) W::read(w + p * step + t * W::kPair, a[t], b[t]);
        for (int r = 0; r < ROWS; ++r) {
            const F16 first = splat<F16>(x[r * ldx + 2 * p]), second = splat<F16>(x[r * ldx + 2 * p + 1]);
            for (int t = 0; t < TILES; ++t) {
                even[r][t] = fma(a[t], first, even[r][t]);
                odd[r][t] = fma(b[t], second, odd[r][t]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int t = 0; t < TILES; ++t) {
            if (outputs > t * kTile) store_part(y + r * ldy + t * kTile, even[r][t] + odd[r][t], outputs - t * kTile);
        }
    }
}

template <class W, int TILES, int ROWS = kRows>
void some_rows(int rows, const char* w, int64_t step, int pairs, const float* x, int64_t ldx, float* y, int64_t ldy, int outputs) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return product<W, TILES, ROWS>(w, step, pairs, x, ldx, y, ldy, outputs);
        some_rows<W, TILES, ROWS - 1>(rows, w, step, pairs, x, ldx, y, ldy, outputs);
    }
}

// One row against a whole group: enough independent sums to hide the latency of an fma.
template <class W>
void one_row(int tiles, const char* w, int pairs, const float* x, float* y, int outputs) {
    const int64_t step = int64_t(tiles) * W::kPair;
    switch (tiles) {
        case 1: return product<W, 1, 1>(w, step, pairs, x, 0, y, 0, outputs);
        case 2: return product<W, 2, 1>(w, step, pairs, x, 0, y, 0, outputs);
        case 3: return product<W, 3, 1>(w, step, pairs, x, 0, y, 0, outputs);
        default: return product<W, 4, 1>(w, step, pairs, x, 0, y, 0, outputs);
    }
}

template <class W>
void run(const Matrix& m, const char* data, const float* x, int64_t ldx, float* y, int64_t ldy, int count) {
    const int all = (m.rows + kTile - 1) / kTile, pairs = m.cols / 2;
    for (int tile = 0; tile < all; tile += kGroup) {
        const int tiles = std::min(kGroup, all - tile);
        const char* w = data + int64_t(tile) * pairs * W::kPair;
        const int outputs = m.rows - tile * kTile;
        if (count == 1) {
            one_row<W>(tiles, w, pairs, x, y + tile * kTile, outputs);
            continue;
        }
        const int64_t step = int64_t(tiles) * W::kPair;
        for (int r = 0; r < count; r += kRows) {
            const int rows = std::min(kRows, count - r);
            int t = 0;
            for (; t + kTiles <= tiles; t += kTiles) {
                some_rows<W, kTiles>(rows, w + t * W::kPair, step, pairs, x + r * ldx, ldx, y + r * ldy + (tile + t) * kTile, ldy, outputs - t * kTile);
            }
            for (; t < tiles; ++t) {
                some_rows<W, 1>(rows, w + t * W::kPair, step, pairs, x + r * ldx, ldx, y + r * ldy + (tile + t) * kTile, ldy, outputs - t * kTile);
            }
        }
    }
}

template <class W>
void pack(const float* from, int rows, int cols, char* to) {
    const std::vector<float> nothing(cols);
    const int all = (rows + kTile - 1) / kTile;
    for (int tile = 0; tile < all; tile += kGroup) {
        const int tiles = std::min(kGroup, all - tile);
        for (int p = 0; p < cols / 2; ++p) {
            for (int t = 0; t < tiles; ++t) {
                float even[kTile], odd[kTile];
                for (int i = 0; i < kTile; ++i) {
                    const int row = (tile + t) * kTile + i;
                    const float* pair = (row < rows ? from + int64_t(row) * cols : nothing.data()) + 2 * p;
                    even[i] = pair[0];
                    odd[i] = pair[1];
                }
                W::write(to, even, odd);
                to += W::kPair;
            }
        }
    }
}

}  // namespace

void linear(const Matrix& w, const float* x, int64_t ldx, float* y, int64_t ldy, int count) { linear(w, 0, x, ldx, y, ldy, count); }

void linear(const Matrix& first, int index, const float* x, int64_t ldx, float* y, int64_t ldy, int count) {
    const char* data = first.data + index * first.bytes;
    if (first.format == 0) {
        run<Bf16>(first, data, x, ldx, y, ldy, count);
    } else {
        run<Fp32>(first, data, x, ldx, y, ldy, count);
    }
}

}  // namespace dix

extern "C" int64_t dix_packed_bytes(int rows, int cols, int format) {
    return int64_t((rows + 15) / 16) * (cols / 2) * (format == 0 ? 64 : 128);
}

// Whether every value is exact in bf16.
extern "C" int dix_exact(const float* from, int64_t count) {
    for (int64_t i = 0; i < count;) {
        uint32_t rest = 0;
        for (const int64_t end = std::min(count, i + 4096); i < end; ++i) {
            uint32_t bits;
            std::memcpy(&bits, from + i, 4);
            rest |= bits & 0xFFFF;
        }
        if (rest) return 0;
    }
    return 1;
}

// from: fp32 [count, rows, cols], cols even; for format 0 every value is exact in bf16. to: `count` packed matrices.
extern "C" void dix_pack(const float* from, int count, int rows, int cols, int format, char* to) {
    for (int i = 0; i < count; ++i) {
        const float* source = from + int64_t(i) * rows * cols;
        char* target = to + i * dix_packed_bytes(rows, cols, format);
        if (format == 0) {
            dix::pack<dix::Bf16>(source, rows, cols, target);
        } else {
            dix::pack<dix::Fp32>(source, rows, cols, target);
        }
    }
}
