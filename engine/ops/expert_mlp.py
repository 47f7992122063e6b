"""Clamped SwiGLU experts over tokens grouped by expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.ops.dense_linear import DENSE_LINEAR
from engine.ops.fixed_rows import in_groups, in_one_shape
from engine.ops.q8 import q8
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, quantize: bool) -> Tensor:
    """Sum over the chosen experts of w2(silu(min(w1 x, limit)) * clamp(w3 x, limit) * weight).

    x: [T, C] bf16 or fp32. ids: [T, K] int64, weights: [T, K] fp32. w13: [E, 2*I, C] (gate rows, then up rows), w2: [E, C, I], x's dtype.
    A choice below 0 is no expert: it adds nothing, and its weight is not read.
    quantize: pass the inputs of both products through `q8`. Returns [T, C] of x's dtype, experts summed in fp32 in the order of `ids`.
    Source: config key `swiglu_limit`; the gate is clamped from above only.
    """
    check(x.ndim == 2 and ids.shape == weights.shape and w13.shape[2] == x.shape[1], "expert_mlp", x=x, ids=ids, weights=weights, w13=w13)
    return EXPERT_MLP(x, ids, weights, w13, w2, limit, quantize)


def expert_parts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, quantize: bool) -> Tensor:
    """The terms of `expert_mlp`'s sum: [T, K, C] of x's dtype, 0 where a choice is no expert. Arguments as there."""
    out, order = _choices(x, ids, weights, w13, w2, limit, quantize)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return out.index_select(0, place).view(*ids.shape, w2.shape[1])


def _reference(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, quantize: bool) -> Tensor:
    return expert_parts(x, ids, weights, w13, w2, limit, quantize).float().sum(1).to(x.dtype)


def _invariant(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, quantize: bool) -> Tensor:
    parts = expert_parts(x, ids, weights, w13, w2, limit, quantize)
    summed: Tensor = in_groups(lambda rows: rows.float().sum(1), parts)
    return summed.to(x.dtype)


def _choices(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, quantize: bool) -> tuple[Tensor, Tensor]:
    """Every choice's term [T*K, C], sorted by expert, and that order."""
    tokens, k = ids.shape
    order, bounds = _group(ids, w13.shape[0])
    source = q8(x) if quantize else x
    grouped = source.expand(k, -1) if tokens == 1 else source.index_select(0, order // k)
    both = x.new_empty(tokens * k, w13.shape[1])
    for expert, begin, end in bounds:
        DENSE_LINEAR(grouped[begin:end], w13[expert], both[begin:end], False)
    act: Tensor = CLAMPED_SWIGLU(both, weights.flatten()[order], limit)
    if quantize:
        act = q8(act)
    out = x.new_empty(tokens * k, w2.shape[1])
    out[: bounds[0][1] if bounds else None] = 0
    for expert, begin, end in bounds:
        DENSE_LINEAR(act[begin:end], w2[expert], out[begin:end], False)
    return out, order


def _group(ids: Tensor, num_experts: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Stable order of the flattened choices by expert, no expert first, and (expert, begin, end) of the experts that have tokens."""
    flat = ids.flatten()
    if flat.device.type == "cpu" and len(flat) <= _FEW:
        # For a handful of choices plain integers are quicker than sorting and counting tensors.
        chosen = flat.tolist()
        ranked = sorted(range(len(chosen)), key=chosen.__getitem__)
        counts = Counter(chosen)
        return torch.tensor(ranked, dtype=torch.int64), _segments((e, counts[e]) for e in sorted(counts))
    order = flat.sort(stable=True).indices
    return order, _segments(enumerate(torch.bincount(flat.clamp(min=-1) + 1, minlength=num_experts + 1).tolist(), start=-1))


def _segments(counts: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    result, begin = [], 0
    for expert, count in counts:
        if count and expert >= 0:
            result.append((expert, begin, begin + count))
        begin += count
    return result


_FEW = 128


def _swiglu(both: Tensor, weights: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up) * weight. both: [R, 2*I], weights: [R] fp32. Returns [R, I] of both's dtype."""
    gate, up = both.float().chunk(2, dim=1)
    return silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit)).mul_(weights[:, None]).to(both.dtype)


def _whole_swiglu(both: Tensor, weights: Tensor, limit: float) -> Tensor:
    act: Tensor = in_one_shape(lambda part, factor: _swiglu(part, factor, limit), both, weights)
    return act


CLAMPED_SWIGLU = Op("clamped_swiglu", reference=_swiglu, invariant={"reference": _whole_swiglu}, tolerance=Tolerance(fp32=2e-6, bf16=8e-3))

EXPERT_MLP = Op("expert_mlp", reference=_reference, invariant={"reference": _invariant}, tolerance=Tolerance(fp32=4e-6, bf16=2e-2))
