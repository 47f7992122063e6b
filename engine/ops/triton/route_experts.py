"""Scores, choice and weights of a token's experts in one kernel: one program a token, all experts in its registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def route(logits, bias, ids, weights, num_experts, scale, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr):
    """logits: [T, E] fp32; ids: [T, K] int64, weights: [T, K] fp32. EXPERTS and SLOTS are powers of two that hold E and K."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    inside = expert < num_experts
    score = tl.sqrt(_softplus(tl.load(logits + row * num_experts + expert, mask=inside, other=0.0)))
    rank = tl.where(inside, score + tl.load(bias + expert, mask=inside, other=0.0), float("-inf"))
    picked = tl.zeros([SLOTS], tl.int64)
    weight = tl.zeros([SLOTS], tl.float32)
    for k in tl.static_range(CHOSEN):
        best = tl.argmax(rank, axis=0, tie_break_left=True)
        here = expert == best
        picked = tl.where(slot == k, best.to(tl.int64), picked)
        weight = tl.where(slot == k, tl.sum(tl.where(here, score, 0.0), axis=0), weight)
        rank = tl.where(here, float("-inf"), rank)
    weight = weight * (scale / (tl.sum(weight, axis=0) + 1e-20))
    place = row * CHOSEN + slot
    tl.store(ids + place, picked, mask=slot < CHOSEN)
    tl.store(weights + place, weight, mask=slot < CHOSEN)


@triton.jit
def _softplus(x):
    """log(1 + e^x) without loss where e^x is small. Above 20 it is x, as in the reference."""
    t = tl.exp(tl.minimum(x, 20.0))
    small = t * (1.0 - t * (0.5 - t * (1.0 / 3.0)))
    return tl.where(x > 20.0, x, tl.where(t < 1e-2, small, tl.log(1.0 + t)))


def launch(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """The op `route_experts`."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, k, device=logits.device)
    if tokens:
        block = triton.next_power_of_2(experts)
        route[(tokens,)](
            logits.contiguous(), bias, ids, weights, experts, scale, block, k, triton.next_power_of_2(k),
            num_warps=max(1, min(4, block // 128)),
        )  # fmt: skip
    return ids, weights
