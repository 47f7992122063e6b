"""Packed cache rows from even and odd channels inside a kernel: the rounding of `q8`, `q4_kv` and `q4_index`, bit for bit.

Only fp32 operations that every target rounds alike are used, so that bytes do not depend on where they were written.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Source: the release's quantisers (see the ops of the same names).
_Q8_FLOOR = tl.constexpr(1e-4)
_Q8_INVERSE_MAX = tl.constexpr(0.0022321429569274187)  # fp32 of 1/448
_INDEX_FLOOR = tl.constexpr(6 * 2.0**-126)
_INDEX_INVERSE_MAX = tl.constexpr(0.1666666716337204)  # fp32 of 1/6
_ENTRY_FLOOR = tl.constexpr(6 * 2.0**-9)


@triton.jit
def encode_e4m3(even, odd, GROUP2: tl.constexpr):
    """even, odd: fp32 [N, D/2]. GROUP2: pairs per scale. Returns words int32 [N, D/2] (even byte low) and E8M0 int32 [N, D/2/GROUP2]."""
    exponents = _ceil_power_of_two(tl.maximum(_group_amax(even, odd, GROUP2), _Q8_FLOOR) * _Q8_INVERSE_MAX)
    inverse = _spread(_power_of_two(254 - exponents), GROUP2, even.shape[1])
    return _e4m3(even * inverse) | (_e4m3(odd * inverse) << 8), exponents


@triton.jit
def encode_entries(even, odd, GROUP2: tl.constexpr):
    """The same for compressed entries: bytes of E2M1 pairs int32 [N, D/2] and E4M3 scales int32 [N, D/2/GROUP2]."""
    amax = tl.maximum(_group_amax(even, odd, GROUP2), _ENTRY_FLOOR)
    scales = _e4m3(tl.minimum(tl.div_rn(amax, 6.0), 448.0))
    value = _spread((scales << 20).to(tl.float32, bitcast=True) * 2.0**120, GROUP2, even.shape[1])
    return _e2m1(tl.div_rn(even, value)) | (_e2m1(tl.div_rn(odd, value)) << 4), scales


@triton.jit
def encode_index(even, odd, GROUP2: tl.constexpr):
    """The same for index keys and queries: bytes of E2M1 pairs and E8M0 scales."""
    exponents = _ceil_power_of_two(tl.maximum(_group_amax(even, odd, GROUP2), _INDEX_FLOOR) * _INDEX_INVERSE_MAX)
    inverse = _spread(_power_of_two(254 - exponents), GROUP2, even.shape[1])
    return _e2m1(even * inverse) | (_e2m1(odd * inverse) << 4), exponents


@triton.jit
def _group_amax(even, odd, GROUP2: tl.constexpr):
    size = tl.maximum(tl.abs(even), tl.abs(odd))
    return tl.max(size.reshape(size.shape[0], size.shape[1] // GROUP2, GROUP2), 2)


@triton.jit
def _spread(groups, GROUP2: tl.constexpr, WIDTH: tl.constexpr):
    return tl.broadcast_to(groups[:, :, None], (groups.shape[0], WIDTH // GROUP2, GROUP2)).reshape(groups.shape[0], WIDTH)


@triton.jit
def _ceil_power_of_two(x):
    """E8M0 of the smallest power of two that is at least `x`, a positive normal fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def _power_of_two(exponents):
    """fp32 2^(e - 127); e below 1 gives the subnormal 2^-127."""
    bits = tl.where(exponents > 0, exponents << 23, 1 << 22)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(x):
    """E4M3 bits int32 of fp32 numbers, nearest even, saturating at 448."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Normal numbers: drop 20 mantissa bits, ties to even, and move the bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9: adding 2^14 leaves exactly that step, rounded to even by the addition itself.
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    return sign | tl.where(size < 0.015625, small, normal)


@triton.jit
def _e2m1(x):
    """E2M1 codes int32 of fp32 numbers, nearest even, saturating at 6."""
    size = tl.abs(x)
    # Thresholds between neighbours; a tie belongs to the one with the even code.
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(codes, exponents, GROUP2: tl.constexpr):
    """fp32 numbers of E2M1 codes int32 [N, C] with E8M0 scales int32 [N, C/GROUP2]."""
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126 * _spread(_power_of_two(exponents), GROUP2, codes.shape[1])
