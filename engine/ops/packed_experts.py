"""Routed and shared experts whose weights stay in their stored formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.dense_linear import dense_linear
from engine.ops.expert_mlp import CLAMPED_SWIGLU
from engine.ops.packed_weights import PackedWeights, split_gate_up, unpack
from engine.ops.q8 import q8
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """w13: E groups of 2 * I rows, gate and up in the order of `pack_gate_up`; w2: E groups of C rows. The shared expert: one group."""

    w13: PackedWeights
    w2: PackedWeights
    shared_w13: PackedWeights
    shared_w2: PackedWeights

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in (self.w13, self.w2, self.shared_w13, self.shared_w2))


def packed_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    """Sum over the chosen experts of w2(silu(min(w1 x, limit)) * clamp(w3 x, limit) * weight), plus the shared expert with weight 1.

    x: [T, C] bf16. ids: [T, K] int64, weights: [T, K] fp32. quantize: pass the inputs of both products through `q8`.
    Returns [T, C] bf16: experts summed in fp32 in the order of `ids`, the shared one last. Source: config key `swiglu_limit`.
    """
    fits = x.ndim == 2 and ids.shape == weights.shape and x.shape[1] == experts.w13.columns == experts.w2.rows
    check(fits and x.dtype == torch.bfloat16, "packed_experts", x=x, ids=ids, weights=weights, w13=experts.w13.codes)
    return PACKED_EXPERTS(x, ids, weights, experts, limit, quantize)


def _reference(x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    parts = routed_terms(x, ids, weights, experts, limit, quantize)
    return (parts.sum(1) + shared_term(x, experts, limit, quantize)).to(x.dtype)


def routed_terms(x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    """Definition of every choice's term [T, K, C] fp32, 0 where the id is negative. Arguments as of `packed_experts`."""
    source = q8(x) if quantize else x
    parts = torch.zeros(*ids.shape, x.shape[1], device=x.device)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        parts[tokens, choices] = _expert(source[tokens], weights[tokens, choices, None], experts.w13, experts.w2, expert, limit, quantize)
    return parts


def shared_term(x: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    """Definition of the shared expert's term [T, C] fp32. Arguments as of `packed_experts`."""
    one = torch.ones(len(x), 1, device=x.device)
    return _expert(q8(x) if quantize else x, one, experts.shared_w13, experts.shared_w2, 0, limit, quantize)


def _expert(x: Tensor, weight: Tensor, w13: PackedWeights, w2: PackedWeights, group: int, limit: float, quantize: bool) -> Tensor:
    """One expert over its tokens; fp32 values of bf16 products. weight: [T, 1]."""
    w1, w3 = split_gate_up(unpack(w13, group, x.dtype))
    act: Tensor = CLAMPED_SWIGLU(torch.cat((dense_linear(x, w1), dense_linear(x, w3)), 1), weight[:, 0], limit)
    return dense_linear(q8(act) if quantize else act, unpack(w2, group, x.dtype)).float()


PACKED_EXPERTS = Op(
    "packed_experts",
    reference=_reference,
    cuda="engine.ops.cuda.packed_experts:launch",
    invariant={"cuda": "engine.ops.cuda.packed_experts:launch_invariant"},
    tolerance=Tolerance(bf16=1e-2),
)
