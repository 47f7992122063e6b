"""y = W x for few rows x, weights in their stored formats."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.dense_linear import dense_linear
from engine.ops.packed_weights import PackedWeights, unpack
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def packed_linear(x: Tensor, weights: PackedWeights) -> Tensor:
    """Block-diagonal product: group g of the output is W_g times group g of the input.

    x: [T, groups * columns] bf16, rows may be strided. Returns [T, groups * rows] bf16; sums in fp32.
    """
    check(
        x.ndim == 2 and x.shape[1] == weights.groups * weights.columns and x.dtype == torch.bfloat16, "packed_linear", x=x, w=weights.codes
    )
    return PACKED_LINEAR(x, weights)


def _reference(x: Tensor, weights: PackedWeights) -> Tensor:
    parts = x.split(weights.columns, dim=1)
    return torch.cat([dense_linear(part, unpack(weights, group, x.dtype)) for group, part in enumerate(parts)], dim=1)


PACKED_LINEAR = Op(
    "packed_linear",
    reference=_reference,
    cuda="engine.ops.cuda.packed_linear:launch",
    invariant={"cuda": "engine.ops.cuda.packed_linear:launch_invariant"},
    tolerance=Tolerance(bf16=8e-3),
)
