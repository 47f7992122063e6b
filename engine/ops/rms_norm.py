"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root-mean-square, then by `weight`.

    x: [T, C] bf16 or fp32, rows may be strided. weight: [C], same dtype. Returns [T, C]; T == 0 is allowed, a zero row stays zero.
    Source: config key `rms_norm_eps`; statistics and the product are fp32 in every implementation.
    """
    check(x.ndim == 2 and weight.shape == x.shape[1:], "rms_norm", x=x, weight=weight)
    return RMS_NORM(x, weight, eps)


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


RMS_NORM = Op("rms_norm", reference=_reference, tolerance=Tolerance(fp32=1e-6, bf16=8e-3))
