"""Scores of all experts for each token, before their choice."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.dense_linear import dense_linear
from engine.ops.registry import Op, check
from engine.ops.tolerance import Tolerance


def expert_logits(x: Tensor, gate: Tensor, temperature: float = 1.0) -> Tensor:
    """[T, C] x [E, C] -> [T, E] fp32, over `temperature`.

    gate: fp32, or bf16 on a GPU, which multiplies bf16 numbers without loss. Sums are fp32: bf16 changes the choice. Source: config key
    `gate_temp`.
    """
    check(x.ndim == 2 and x.shape[1:] == gate.shape[1:], "expert_logits", x=x, gate=gate)
    logits: Tensor = EXPERT_LOGITS(x, gate)
    return logits if temperature == 1.0 else logits / temperature


def _reference(x: Tensor, gate: Tensor) -> Tensor:
    if gate.is_cuda and gate.dtype is torch.bfloat16:
        return dense_linear(x.to(gate.dtype), gate, wide=True)
    return dense_linear(x.float(), gate.float())


EXPERT_LOGITS = Op(
    "expert_logits",
    reference=_reference,
    triton="engine.ops.triton.expert_logits:launch",
    invariant={"triton": "engine.ops.triton.expert_logits:launch_invariant"},
    tolerance=Tolerance(fp32=4e-6, bf16=4e-6),
)
