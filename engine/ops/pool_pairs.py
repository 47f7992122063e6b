"""Two neighbouring tokens become one compressed entry."""

from __future__ import annotations

from torch import Tensor

from engine.ops.fixed_rows import in_one_shape
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """Per-channel softmax over the two gates, then the weighted sum of the two values.

    first, second: [E, 2*D] fp32, values then gates. Returns [E, D] fp32.
    """
    check(first.shape == second.shape and first.ndim == 2, "pool_pairs", first=first, second=second)
    return POOL_PAIRS(first, second)


def _reference(first: Tensor, second: Tensor) -> Tensor:
    width = first.shape[1] // 2
    # A softmax over two values is a sigmoid of their difference.
    share = (first[:, width:] - second[:, width:]).sigmoid_()
    return second[:, :width].lerp(first[:, :width], share)


def _invariant(first: Tensor, second: Tensor) -> Tensor:
    pooled: Tensor = in_one_shape(_reference, first, second)
    return pooled


POOL_PAIRS = Op("pool_pairs", reference=_reference, invariant={"reference": _invariant}, tolerance=Tolerance(fp32=2e-6))
