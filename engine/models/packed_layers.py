"""Linear layers and experts whose weights stay on the device as they are stored, for steps whose time is the reading of weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.loader import WeightSource
from engine.models.config import TextConfig
from engine.models.moe import choose_experts, skip_expert, slots_by_expert
from engine.models.numerics import BlockLinear, Linear, Numerics, WideLinear
from engine.models.probe import Probe
from engine.ops.expert_logits import expert_logits
from engine.ops.packed_experts import PackedExperts, packed_experts
from engine.ops.packed_linear import OrderedWeights, order_weights, packed_linear
from engine.ops.packed_weights import Format, PackedWeights, pack_gate_up
from engine.ops.q8 import q8
from engine.ops.routed_experts import routed_experts, shared_expert
from engine.ops.weight_formats import BLOCK, decode_fp8_blocks
from engine.parallel.expert_exchange import ExpertExchange

log = logging.getLogger(__name__)

# Up to so many rows reading half the bytes pays for decoding them; above, products are the time and the library's bf16 kernels are faster.
FEW_ROWS = 32


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x [T, G * C] -> [T, G * A], group by group. packed: FP8 for few rows. dense: bf16 [G, A, C] for many, None in batch-invariant mode.
    ordered: what serves many rows there, None where FP8 serves all.
    """

    packed: PackedWeights
    dense: BlockLinear | None
    quantize_input: bool = False
    ordered: OrderedWeights | None = None

    @staticmethod
    def of(values: Tensor, scale: Tensor, groups: int, quantize_input: bool, numerics: Numerics) -> PackedLinear:
        """values: e4m3 [G * A, C], scale: [G * A / 32, C / 32] uint8; A a multiple of 32 unless there is one group."""
        packed = PackedWeights.empty(Format.FP8, groups, len(values) // groups, values.shape[1], values.device)
        for group, parts in enumerate(zip(values.chunk(groups), scale.chunk(groups), strict=True)):
            packed.fill(group, *parts)
        dense = decode_fp8_blocks(values, scale, numerics.dtype).unflatten(0, (groups, -1))
        if numerics.invariant:
            return PackedLinear(packed, None, quantize_input, order_weights(packed, dense))
        return PackedLinear(packed, BlockLinear(dense), quantize_input)

    def __call__(self, x: Tensor) -> Tensor:
        x = q8(x) if self.quantize_input else x
        if self.dense is None or len(x) <= FEW_ROWS:
            return packed_linear(x, self.packed, self.ordered)
        return self.dense(x)


AnyLinear = Linear | PackedLinear
AnyBlockLinear = BlockLinear | PackedLinear


def load_linear(source: WeightSource, names: list[str], numerics: Numerics, quantize_input: bool) -> AnyLinear:
    """Quantised matrices of equal width, stacked. Packed when every matrix but the last is whole 32-row blocks."""
    if not numerics.packed_weights:
        weights = [source.tensor(name, numerics.dtype) for name in names]
        return Linear(weights[0] if len(weights) == 1 else torch.cat(weights), quantize_input)
    stored = [_stored(source, name) for name in names]
    assert all(len(values) % BLOCK == 0 for values, _ in stored[:-1]), f"{names} do not stack in blocks of {BLOCK} rows"
    values = torch.cat([part.view(torch.uint8) for part, _ in stored]).view(torch.float8_e4m3fn)
    return PackedLinear.of(values, torch.cat([scale for _, scale in stored]), 1, quantize_input, numerics)


def load_block_linear(source: WeightSource, name: str, groups: int, numerics: Numerics) -> AnyBlockLinear:
    """A quantised matrix whose rows are cut into `groups` matrices of a block-diagonal product; its input is never quantised."""
    if not numerics.packed_weights:
        return BlockLinear(source.tensor(name, numerics.dtype).unflatten(0, (groups, -1)).contiguous())
    values, scale = _stored(source, name)
    if (len(values) // groups) % BLOCK:
        log.info("%s keeps bf16 weights: its groups are not whole blocks of %d rows", name, BLOCK)
        return BlockLinear(decode_fp8_blocks(values, scale, numerics.dtype).unflatten(0, (groups, -1)))
    return PackedLinear.of(values, scale, groups, False, numerics)


@dataclass(frozen=True, slots=True)
class PackedMoE:
    """The same experts as `MoE`, in their stored formats. bias [E] fp32. exchange: as there."""

    gate: WideLinear
    bias: Tensor
    experts: PackedExperts
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
    ) -> PackedMoE:
        """prefix: `layers.3.ffn`. Expert after expert, so that one more expert is all the memory that packing needs."""
        inner, hidden = text.moe_intermediate_size, text.hidden_size
        gate = WideLinear.load(source, f"{prefix}.gate.weight", numerics)
        bias, _ = (source.tensor(f"{prefix}.gate.{part}", torch.float32) for part in ("bias", "bias_vl"))
        held = slots_by_expert(num_experts, exchange)
        count = sum(map(len, held))
        w13 = PackedWeights.empty(Format.FP4, count, 2 * inner, hidden, bias.device)
        w2 = PackedWeights.empty(Format.FP4, count, hidden, inner, bias.device)
        for expert, slots in enumerate(held):
            if not slots:
                skip_expert(source, f"{prefix}.experts.{expert}")
                continue
            one = pack_gate_up(*_gate_and_up(source, f"{prefix}.experts.{expert}"), Format.FP4)
            down = _stored(source, f"{prefix}.experts.{expert}.w2.weight")
            for slot in slots:
                w13.codes[slot], w13.scales[slot] = one.codes[0], one.scales[0]
                w2.fill(slot, *down)
        shared = f"{prefix}.shared_experts"
        shared_w2 = PackedWeights.empty(Format.FP8, 1, hidden, inner, bias.device)
        shared_w13 = pack_gate_up(*_gate_and_up(source, shared), Format.FP8)
        shared_w2.fill(0, *_stored(source, f"{shared}.w2.weight"))
        experts = PackedExperts(w13, w2, shared_w13, shared_w2)
        return PackedMoE(gate, bias, experts, num_chosen, text, numerics.quantize_inputs, exchange)

    def __call__(self, x: Tensor, layer: int = -1, probe: Probe | None = None) -> Tensor:
        """x: [T, C]. Returns [T, C] of x's dtype."""
        logits = expert_logits(x, self.gate.weight, self.text.gate_temp)
        ids, weights = choose_experts(logits, self.bias, self.num_chosen, self.text, layer, probe)
        if self.exchange is not None:
            return self.exchange.run(layer, x, ids, weights)
        return packed_experts(x, ids, weights, self.experts, self.text.swiglu_limit, self.quantize)

    # ---- as one rank's share of the experts, see `engine.parallel.expert_exchange.Experts`

    @property
    def _ranks(self) -> int:
        return 1 if self.exchange is None else self.exchange.group.size

    @property
    def stores(self) -> list[Tensor]:
        return [self.experts.w13.codes, self.experts.w13.scales, self.experts.w2.codes, self.experts.w2.scales]

    def parts(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return routed_experts(x, slots, weights, self.experts, self.text.swiglu_limit, self.quantize, summed=False, ranks=self._ranks)

    def summed(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return routed_experts(x, slots, weights, self.experts, self.text.swiglu_limit, self.quantize, summed=True, ranks=self._ranks)

    def shared(self, x: Tensor) -> Tensor:
        return shared_expert(x, self.experts, self.text.swiglu_limit, self.quantize)

    def add_up(self, parts: Tensor, shared: Tensor) -> Tensor:
        total = torch.zeros_like(parts[:, 0])
        for choice in parts.unbind(1):  # in the order of the kernel that has all parts: a library's depends on the number of rows
            total += choice
        return (total + shared).to(shared.dtype)


def _gate_and_up(source: WeightSource, prefix: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return _stored(source, f"{prefix}.w1.weight"), _stored(source, f"{prefix}.w3.weight")


def _stored(source: WeightSource, name: str) -> tuple[Tensor, Tensor]:
    values, scale = source.stored(name)
    assert scale is not None, f"{name} is not stored in a quantised format"
    return values, scale
