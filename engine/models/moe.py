"""Mixture of experts: router, routed experts and the shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.loader import WeightSource
from engine.models.config import TextConfig
from engine.models.numerics import Numerics
from engine.models.probe import Probe
from engine.ops.expert_logits import expert_logits
from engine.ops.expert_mlp import expert_mlp, expert_parts
from engine.ops.fixed_rows import in_groups
from engine.ops.route_experts import route_experts
from engine.parallel.expert_exchange import ExpertExchange


@dataclass(frozen=True, slots=True)
class MoE:
    """gate [E, C], bias and bias_vl [E] fp32. w13 [E+1, 2*I, C] and w2 [E+1, C, I]: the last expert is the shared one.

    The shared expert is one more choice of every token with weight 1, so that one pass over the experts serves both kinds.
    bias_vl replaces bias on image positions; a text-only engine keeps it unused.
    exchange: None when all experts are here; otherwise w13 and w2 hold those of this rank's slots, [c+1, ...], the shared one last.
    """

    gate: Tensor
    bias: Tensor
    bias_vl: Tensor
    w13: Tensor
    w2: Tensor
    num_chosen: int
    text: TextConfig
    quantize: bool
    exchange: ExpertExchange | None = None

    @staticmethod
    def load(
        source: WeightSource,
        prefix: str,
        text: TextConfig,
        numerics: Numerics,
        num_experts: int,
        num_chosen: int,
        exchange: ExpertExchange | None = None,
    ) -> MoE:
        """prefix: `layers.3.ffn`. With an exchange only the experts of this rank's slots are read."""
        inner, hidden = text.moe_intermediate_size, text.hidden_size
        gate, bias, bias_vl = (source.tensor(f"{prefix}.gate.{part}", torch.float32) for part in ("weight", "bias", "bias_vl"))
        held = slots_by_expert(num_experts, exchange)
        count = sum(map(len, held))
        w13 = torch.empty(count + 1, 2 * inner, hidden, dtype=numerics.dtype, device=gate.device)
        w2 = torch.empty(count + 1, hidden, inner, dtype=numerics.dtype, device=gate.device)
        for expert, slots in enumerate([*held, [count]]):
            name = f"{prefix}.experts.{expert}" if expert < num_experts else f"{prefix}.shared_experts"
            if not slots:
                skip_expert(source, name)
                continue
            w13[slots, :inner] = source.tensor(f"{name}.w1.weight", numerics.dtype)
            w13[slots, inner:] = source.tensor(f"{name}.w3.weight", numerics.dtype)
            w2[slots] = source.tensor(f"{name}.w2.weight", numerics.dtype)
        return MoE(gate, bias, bias_vl, w13, w2, num_chosen, text, numerics.quantize_inputs, exchange)

    def __call__(self, x: Tensor, layer: int = -1, probe: Probe | None = None) -> Tensor:
        """x: [T, C]. Returns [T, C] of x's dtype."""
        logits = expert_logits(x, self.gate, self.text.gate_temp)
        ids, weights = choose_experts(logits, self.bias, self.num_chosen, self.text, layer, probe)
        if self.exchange is not None:
            return self.exchange.run(layer, x, ids, weights)
        shared = self.gate.shape[0]
        ids = torch.nn.functional.pad(ids, (0, 1), value=shared)
        weights = torch.nn.functional.pad(weights, (0, 1), value=1.0)
        return expert_mlp(x, ids, weights, self.w13, self.w2, self.text.swiglu_limit, self.quantize)

    # ---- as one rank's share of the experts, see `engine.parallel.expert_exchange.Experts`

    @property
    def stores(self) -> list[Tensor]:
        return [self.w13, self.w2]

    def parts(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return expert_parts(x, slots, weights, self.w13, self.w2, self.text.swiglu_limit, self.quantize)

    def summed(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return expert_mlp(x, slots, weights, self.w13, self.w2, self.text.swiglu_limit, self.quantize)

    def shared(self, x: Tensor) -> Tensor:
        slots = torch.full((len(x), 1), len(self.w13) - 1, device=x.device)
        return self.summed(x, slots, torch.ones_like(slots, dtype=torch.float32))

    def add_up(self, parts: Tensor, shared: Tensor) -> Tensor:
        summed: Tensor = in_groups(lambda rows: rows.float().sum(1), torch.cat((parts, shared[:, None]), 1))  # as `expert_mlp` sums
        return summed.to(shared.dtype)


def choose_experts(
    logits: Tensor, bias: Tensor, num_chosen: int, text: TextConfig, layer: int, probe: Probe | None
) -> tuple[Tensor, Tensor]:
    """`route_experts` as every kind of layer calls it. logits: [T, E] fp32. Returns ids [T, K] int64 and weights [T, K] fp32."""
    ids, weights = route_experts(logits, bias, num_chosen, text.routed_scaling_factor)
    if probe is not None:
        probe.record("router_ids", layer, ids)
        probe.record("router_w", layer, weights)
    return ids, weights


def slots_by_expert(num_experts: int, exchange: ExpertExchange | None) -> list[list[int]]:
    """Expert -> the slots of this rank that hold it: one each, without an exchange."""
    held = range(num_experts) if exchange is None else exchange.local_experts
    slots: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(held):
        slots[expert].append(slot)
    return slots


def skip_expert(source: WeightSource, prefix: str) -> None:
    """Leave an expert to the ranks that have a slot for it."""
    source.skip(f"{prefix}.{part}.weight" for part in ("w1", "w2", "w3"))
