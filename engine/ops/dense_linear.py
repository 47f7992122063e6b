"""Products with plain weights, by the library."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fixed_rows import fixed_linear
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def dense_linear(x: Tensor, weight: Tensor, out: Tensor | None = None, wide: bool = False) -> Tensor:
    """x [T, C] times weight [A, C] transposed: [T, A].

    x, weight: fp32 or bf16, the same. wide: fp32 results of bf16 numbers, on a GPU only. out: [T, A] to write to, of the result's dtype.
    """
    check(x.ndim == 2 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype, "dense_linear", x=x, weight=weight)
    result: Tensor = DENSE_LINEAR(x, weight, out, wide)
    return result


def _reference(x: Tensor, weight: Tensor, out: Tensor | None, wide: bool) -> Tensor:
    if wide and x.dtype is not torch.float32:
        if out is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return torch.nn.functional.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)


def block_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, G * C] -> [T, G * A]: group g of the output is weight[g] times group g of the input. weight: [G, A, C] of x's dtype."""
    check(x.ndim == 2 and x.shape[1] == weight.shape[0] * weight.shape[2], "block_linear", x=x, weight=weight)
    result: Tensor = BLOCK_LINEAR(x, weight)
    return result


def _blocks(x: Tensor, weight: Tensor) -> Tensor:
    parts = x.unflatten(-1, (len(weight), -1)).transpose(0, 1)
    return torch.bmm(parts, weight.transpose(1, 2)).transpose(0, 1).flatten(1)


def _fixed_blocks(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([fixed_linear(part, one) for part, one in zip(x.split(weight.shape[2], 1), weight, strict=True)], 1)


DENSE_LINEAR = Op("dense_linear", reference=_reference, invariant={"reference": fixed_linear}, tolerance=Tolerance(fp32=4e-6, bf16=8e-3))
BLOCK_LINEAR = Op("block_linear", reference=_blocks, invariant={"reference": _fixed_blocks}, tolerance=Tolerance(fp32=4e-6, bf16=8e-3))
