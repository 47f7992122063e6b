"""Rotary embedding on the last dimensions of a vector, interleaved pairs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def plain_frequencies(rope_dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """[R/2] fp32: 1 / base^(2i/R), every operation in fp32 as in the release. Source: config key `rope_theta`."""
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32, device=device) / rope_dim
    return 1.0 / (base**exponent)


def yarn_frequencies(
    rope_dim: int, base: float, factor: float, beta_fast: float, beta_slow: float, original_len: int, device: torch.device | None = None
) -> Tensor:
    """[R/2] fp32: slow pairs stretched by `factor`, fast ones kept, a ramp between. Source: config key `rope_scaling`."""

    def correction(rotations: float) -> float:
        return rope_dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    ramp = (torch.arange(rope_dim // 2, dtype=torch.float32, device=device) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    plain = plain_frequencies(rope_dim, base, device)
    return (plain / factor) * ramp + plain * (1 - ramp)


def rotation(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Unit complex numbers e^(i * position * frequency). positions: [T] integers; returns [T, R/2] complex64, angles in fp32."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(x: Tensor, rot: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i+1) of the last R dimensions of `x` in place; pass `rot.conj()` for the inverse.

    x: [T, D] or [T, H, D] bf16 or fp32, the last axis contiguous, D even. rot: [T, R/2] complex64. Returns `x`.
    """
    check(x.shape[0] == rot.shape[0] and x.shape[-1] >= 2 * rot.shape[1], "rope", x=x, rot=rot)
    return ROPE(x, rot)


def _reference(x: Tensor, rot: Tensor) -> Tensor:
    tail = x[..., -2 * rot.shape[-1] :]
    if x.ndim == 3:
        rot = rot[:, None]
    if x.dtype == torch.float32:
        torch.view_as_complex(tail.unflatten(-1, (-1, 2))).mul_(rot)
        return x
    pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)))
    tail.copy_(torch.view_as_real(pairs * rot).flatten(-2))
    return x


ROPE = Op("rope", reference=_reference, tolerance=Tolerance(fp32=1e-6, bf16=8e-3))
