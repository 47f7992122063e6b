"""The two halves of `packed_experts`, for ranks that hold a share of the routed experts."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.packed_experts import PackedExperts, routed_terms, shared_term
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def routed_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool, summed: bool, ranks: int = 1
) -> Tensor:
    """The routed experts of `packed_experts`, arguments as there, and ids below 0 for choices that are computed elsewhere.

    ranks: how many share the experts, a hint for the division of work.
    Returns their sum [T, C] bf16 (fp32 sums in the order of `ids`), or, not `summed`, every choice's term [T, K, C] fp32, 0 for others'.
    """
    fits = x.ndim == 2 and ids.shape == weights.shape and x.shape[1] == experts.w13.columns == experts.w2.rows
    check(fits and x.dtype == torch.bfloat16, "routed_experts", x=x, ids=ids, weights=weights, w13=experts.w13.codes)
    result: Tensor = ROUTED_EXPERTS(x, ids, weights, experts, limit, quantize, summed, ranks)
    return result


def shared_expert(x: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    """The shared expert of `packed_experts`: x [T, C] bf16 -> [T, C] bf16."""
    result: Tensor = SHARED_EXPERT(x, experts, limit, quantize)
    return result


def _routed(
    x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool, summed: bool, ranks: int
) -> Tensor:
    parts = routed_terms(x, ids, weights, experts, limit, quantize)
    return parts.sum(1).to(x.dtype) if summed else parts


def _shared(x: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    return shared_term(x, experts, limit, quantize).to(x.dtype)


_KERNELS = "engine.ops.cuda.routed_experts"
ROUTED_EXPERTS = Op(
    "routed_experts",
    reference=_routed,
    cuda=f"{_KERNELS}:routed",
    invariant={"cuda": f"{_KERNELS}:routed_invariant"},
    tolerance=Tolerance(bf16=1e-2),
)
SHARED_EXPERT = Op(
    "shared_expert",
    reference=_shared,
    cuda=f"{_KERNELS}:shared",
    invariant={"cuda": f"{_KERNELS}:shared_invariant"},
    tolerance=Tolerance(bf16=1e-2),
)
