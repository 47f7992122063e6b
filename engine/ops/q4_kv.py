"""FP4 round trip of compressed KV entries."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.number_formats import E2M1_MAX, E4M3_MAX, e2m1_codes, e2m1_values, round_e2m1, round_e4m3
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance

GROUP = 16
# Source: the release's KV quantiser: the smallest scale is the smallest E4M3 number, 2^-9.
_FLOOR = 6 * 2.0**-9


def q4_kv(x: Tensor) -> Tensor:
    """Round `x` through E2M1 with one E4M3 scale per 16 channels.

    x: [..., C] bf16 or fp32, C a multiple of 16. Returns the same shape and dtype; results are exact in bf16.
    """
    check(x.shape[-1] % GROUP == 0, "q4_kv", x=x)
    return Q4_KV(x)


def q4_kv_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The stored form of `q4_kv(x)`: 4-bit codes uint8 [..., C] (unpacked) and e4m3 scales [..., C/16]."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    # GPUs multiply by the reciprocal of a Python number; a divisor that is a tensor is divided by, as on the CPU.
    six = torch.full((), E2M1_MAX, device=x.device)
    scale = round_e4m3((groups.abs().amax(-1).clamp(min=_FLOOR) / six).clamp(max=E4M3_MAX))
    return e2m1_codes(round_e2m1(groups / scale.float()[..., None])).flatten(-2), scale


def _reference(x: Tensor) -> Tensor:
    codes, scale = q4_kv_codes(x)
    return (e2m1_values(codes).unflatten(-1, (-1, GROUP)) * scale.float()[..., None]).flatten(-2).to(x.dtype)


Q4_KV = Op("q4_kv", reference=_reference, tolerance=Tolerance())
