"""FP8 round trip of activations and window keys."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.number_formats import ceil_power_of_two, e8m0_values, round_e4m3
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

GROUP = 32
# Source: the release's activation quantiser: amax floor and fp32 reciprocal of the largest E4M3 value.
_FLOOR = 1e-4
_INVERSE_MAX = torch.tensor(1 / 448, dtype=torch.float32).item()


def q8(x: Tensor) -> Tensor:
    """Round `x` through E4M3 with one power-of-two scale per 32 channels.

    x: [..., C] bf16 or fp32, C a multiple of 32. Returns the same shape and dtype; results are exact in bf16.
    """
    check(x.shape[-1] % GROUP == 0, "q8", x=x)
    return Q8(x)


def q8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The stored form of `q8(x)`: e4m3 [..., C] and E8M0 bytes uint8 [..., C/32]."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = ceil_power_of_two(groups.abs().amax(-1).clamp(min=_FLOOR) * _INVERSE_MAX)
    return round_e4m3(groups / e8m0_values(scale)[..., None]).flatten(-2), scale


def _reference(x: Tensor) -> Tensor:
    codes, scale = q8_codes(x)
    return (codes.float().unflatten(-1, (-1, GROUP)) * e8m0_values(scale)[..., None]).flatten(-2).to(x.dtype)


Q8 = Op("q8", reference=_reference, tolerance=Tolerance())
