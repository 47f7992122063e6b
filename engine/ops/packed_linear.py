"""y = W x for few rows x, weights in their stored formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.dense_linear import dense_linear
from engine.ops.packed_weights import PackedWeights, unpack
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class OrderedWeights:
    """Packed weights once more for many rows. values: bf16 [groups, rows, padded columns] in the order of packed products, of `slices`."""

    values: Tensor
    slices: int


def order_weights(weights: PackedWeights, values: Tensor) -> OrderedWeights | None:
    """What batch-invariant mode multiplies many rows with. values: [groups, rows, columns] bf16, the numbers that `weights` hold.

    None where no kernel has the order of packed products: then the packed weights serve any number of rows.
    """
    if PACKED_LINEAR.backend != "cuda":
        return None
    from engine.ops.cuda.packed_linear import order

    return order(weights, values)


def packed_linear(x: Tensor, weights: PackedWeights, ordered: OrderedWeights | None = None) -> Tensor:
    """Block-diagonal product: group g of the output is W_g times group g of the input.

    x: [T, groups * columns] bf16, rows may be strided. Returns [T, groups * rows] bf16; sums in fp32. ordered: the same weights as
    `order_weights` made them, for batch-invariant mode.
    """
    check(
        x.ndim == 2 and x.shape[1] == weights.groups * weights.columns and x.dtype == torch.bfloat16, "packed_linear", x=x, w=weights.codes
    )
    return PACKED_LINEAR(x, weights, ordered)


def _reference(x: Tensor, weights: PackedWeights, ordered: OrderedWeights | None = None) -> Tensor:
    parts = x.split(weights.columns, dim=1)
    return torch.cat([dense_linear(part, unpack(weights, group, x.dtype)) for group, part in enumerate(parts)], dim=1)


PACKED_LINEAR = Op(
    "packed_linear",
    reference=_reference,
    cuda="engine.ops.cuda.packed_linear:launch",
    invariant={"cuda": "engine.ops.cuda.packed_linear:launch_invariant"},
    tolerance=Tolerance(bf16=8e-3),
)
