"""Fake quantisation with straight-through gradients: the released KV and index round trips, bit for bit in f32.

Arithmetic on exponent bits instead of float8 casts, so that every device and the compiler treat it alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|) of f32 values, -127 for zero and subnormals."""
    return ((x.view(torch.int32) >> 23) & 255) - 127


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def _ceil_power_of_two(x: Tensor) -> Tensor:
    """2^ceil(log2 x) for positive normal f32 x."""
    bits = x.view(torch.int32)
    return _power_of_two(((bits >> 23) & 255) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32))


def _round_float(x: Tensor, mantissa_bits: int, min_exponent: int) -> Tensor:
    """Nearest value (ties to even) with the given mantissa width and smallest normal exponent."""
    step = _power_of_two(_exponent(x).clamp(min=min_exponent) - mantissa_bits)
    return torch.round(x / step) * step


def round_e4m3(x: Tensor) -> Tensor:
    return _round_float(x.clamp(-448.0, 448.0), 3, -6)


def round_e2m1(x: Tensor) -> Tensor:
    return _round_float(x.clamp(-6.0, 6.0), 1, 0)


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    # The difference is an exact zero, so the value is the rounded one to the last bit and the gradient is the identity.
    return rounded.to(x.dtype) + (x - x.detach())


def q8(x: Tensor) -> Tensor:
    """Window keys: e4m3 in groups of 32 channels with power-of-two scales. x [..., D]; any float dtype, kept."""
    f = x.detach().float().unflatten(-1, (-1, 32))
    scale = _ceil_power_of_two(f.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1.0 / 448.0))
    return _straight_through(x, (round_e4m3(f / scale) * scale).flatten(-2))


def q4_index(x: Tensor) -> Tensor:
    """Index queries and keys: e2m1 in groups of 32 channels with power-of-two scales."""
    f = x.detach().float().unflatten(-1, (-1, 32))
    scale = _ceil_power_of_two(f.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) * (1.0 / 6.0))
    return _straight_through(x, (round_e2m1(f / scale) * scale).flatten(-2))


def q4_kv(x: Tensor) -> Tensor:
    """Compressed KV entries: e2m1 in groups of 16 channels with e4m3 scales."""
    f = x.detach().float().unflatten(-1, (-1, 16))
    scale = round_e4m3((f.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9) / 6.0).clamp(max=448.0))
    return _straight_through(x, (round_e2m1(f / scale) * scale).flatten(-2))
