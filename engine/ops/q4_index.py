"""FP4 round trip of index queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.number_formats import ceil_power_of_two, e2m1_codes, e2m1_values, e8m0_values, round_e2m1
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

GROUP = 32
# Source: the release's FP4 quantiser: the amax floor keeps the scale a normal number.
_FLOOR = 6 * 2.0**-126
_INVERSE_MAX = torch.tensor(1 / 6, dtype=torch.float32).item()


def q4_index(x: Tensor) -> Tensor:
    """Round `x` through E2M1 with one power-of-two scale per 32 channels.

    x: [..., C] bf16 or fp32, C a multiple of 32. Returns the same shape and dtype; results are exact in bf16.
    """
    check(x.shape[-1] % GROUP == 0, "q4_index", x=x)
    return Q4_INDEX(x)


def q4_index_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The stored form of `q4_index(x)`: 4-bit codes uint8 [..., C] (unpacked) and E8M0 bytes uint8 [..., C/32]."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = ceil_power_of_two(groups.abs().amax(-1).clamp(min=_FLOOR) * _INVERSE_MAX)
    return e2m1_codes(round_e2m1(groups / e8m0_values(scale)[..., None])).flatten(-2), scale


def _reference(x: Tensor) -> Tensor:
    codes, scale = q4_index_codes(x)
    return (e2m1_values(codes).unflatten(-1, (-1, GROUP)) * e8m0_values(scale)[..., None]).flatten(-2).to(x.dtype)


Q4_INDEX = Op("q4_index", reference=_reference, tolerance=Tolerance())
