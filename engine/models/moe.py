"""Mixture of experts: router, routed experts and the shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.loader import WeightSource
from engine.models.config import TextConfig
from engine.models.numerics import Numerics
from engine.models.probe import Probe
from engine.ops.expert_mlp import expert_mlp
from engine.ops.route_experts import expert_logits, route_experts


@dataclass(frozen=True, slots=True)
class MoE:
    """gate [E, C], bias and bias_vl [E] fp32. w13 [E+1, 2*I, C] and w2 [E+1, C, I]: the last expert is the shared one.

    The shared expert is one more choice of every token with weight 1, so that one pass over the experts serves both kinds.
    bias_vl replaces bias on image positions; a text-only engine keeps it unused.
    """

    gate: Tensor
    bias: Tensor
    bias_vl: Tensor
    w13: Tensor
    w2: Tensor
    num_chosen: int
    text: TextConfig
    quantize: bool

    @staticmethod
    def load(source: WeightSource, prefix: str, text: TextConfig, numerics: Numerics, num_experts: int, num_chosen: int) -> MoE:
        """prefix: `layers.3.ffn`."""
        inner, hidden = text.moe_intermediate_size, text.hidden_size
        gate, bias, bias_vl = (source.tensor(f"{prefix}.gate.{part}", torch.float32) for part in ("weight", "bias", "bias_vl"))
        w13 = torch.empty(num_experts + 1, 2 * inner, hidden, dtype=numerics.dtype, device=gate.device)
        w2 = torch.empty(num_experts + 1, hidden, inner, dtype=numerics.dtype, device=gate.device)
        for expert in range(num_experts + 1):
            name = f"{prefix}.experts.{expert}" if expert < num_experts else f"{prefix}.shared_experts"
            w13[expert, :inner] = source.tensor(f"{name}.w1.weight", numerics.dtype)
            w13[expert, inner:] = source.tensor(f"{name}.w3.weight", numerics.dtype)
            w2[expert] = source.tensor(f"{name}.w2.weight", numerics.dtype)
        return MoE(gate, bias, bias_vl, w13, w2, num_chosen, text, numerics.quantize_inputs)

    def __call__(self, x: Tensor, layer: int = -1, probe: Probe | None = None) -> Tensor:
        """x: [T, C]. Returns [T, C] of x's dtype."""
        logits = expert_logits(x, self.gate, self.text.gate_temp)
        ids, weights = route_experts(logits, self.bias, self.num_chosen, self.text.routed_scaling_factor)
        if probe is not None:
            probe.record("router_ids", layer, ids)
            probe.record("router_w", layer, weights)
        shared = self.gate.shape[0]
        ids = torch.nn.functional.pad(ids, (0, 1), value=shared)
        weights = torch.nn.functional.pad(weights, (0, 1), value=1.0)
        return expert_mlp(x, ids, weights, self.w13, self.w2, self.text.swiglu_limit, self.quantize)
