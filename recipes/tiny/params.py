"""Parameters by released tensor name: initial values, and reading a released checkpoint at logical shapes.

Experts are stacked: `<layer>.ffn.w1`, `.w3` [E+1, I, C] and `.w2` [E+1, C, I], the shared expert last. Everything is f32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recipes.tiny.shape import Shape

Params = dict[str, Tensor]


def block_prefixes(shape: Shape) -> Iterator[tuple[str, int | None]]:
    """(name prefix, layer id or None for a draft stage) of every transformer block."""
    yield from ((f"layers.{layer}.", layer) for layer in range(shape.num_layers))
    yield from ((f"mtp.{stage}.", None) for stage in range(shape.draft_stages))


class _Init:
    """Draws initial values from one generator, in a fixed order."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.params = shape, {}
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, name: str, *size: int, std: float) -> None:
        self.params[name] = torch.randn(*size, generator=self.generator) * std

    def matrix(self, name: str, *size: int, gain: float = 1.0) -> None:
        self.normal(name, *size, std=gain * size[-1] ** -0.5)

    def ones(self, name: str, *size: int) -> None:
        self.params[name] = torch.ones(*size)

    def mixes(self, prefix: str) -> None:
        """Hyper-connections that start near the identity, with noise that separates the streams."""
        n = self.shape.streams
        self.normal(f"{prefix}_fn", (2 + n) * n, n * self.shape.hidden, std=0.01)
        self.params[f"{prefix}_scale"] = torch.full((3,), 0.5)
        base = torch.cat((torch.full((n,), -0.5), torch.zeros(n), (2.5 * torch.eye(n)).flatten()))
        self.params[f"{prefix}_base"] = base + 0.3 * torch.randn(base.shape, generator=self.generator)

    def block(self, p: str, experts: int) -> None:
        s = self.shape
        out = 0.5 * (2 * s.num_layers) ** -0.5
        self.matrix(p + "attn.wq_a.weight", s.q_lora, s.hidden)
        self.matrix(p + "attn.wq_b.weight", s.heads * s.head_dim, s.q_lora)
        self.matrix(p + "attn.wkv.weight", s.head_dim, s.hidden)
        self.matrix(p + "attn.wo_a.weight", s.o_groups * s.o_lora, s.heads * s.head_dim // s.o_groups)
        self.matrix(p + "attn.wo_b.weight", s.hidden, s.o_groups * s.o_lora, gain=out)
        self.ones(p + "attn.q_norm.weight", s.q_lora)
        self.ones(p + "attn.kv_norm.weight", s.head_dim)
        self.params[p + "attn.attn_sink"] = torch.zeros(s.heads)
        self.ones(p + "attn_norm.weight", s.hidden)
        self.ones(p + "ffn_norm.weight", s.hidden)
        self.mixes(p + "hc_attn")
        self.mixes(p + "hc_ffn")
        self.matrix(p + "ffn.gate.weight", experts, s.hidden)
        self.params[p + "ffn.gate.bias"] = torch.zeros(experts)
        self.matrix(p + "ffn.w1", experts + 1, s.moe_inter, s.hidden)
        self.matrix(p + "ffn.w3", experts + 1, s.moe_inter, s.hidden)
        self.matrix(p + "ffn.w2", experts + 1, s.hidden, s.moe_inter, gain=out)

    def sources(self, p: str, layer: int) -> None:
        """Compressor, indexer and engram of one backbone layer, where it has them."""
        s = self.shape
        if layer in s.kv_sources:
            self.matrix(p + "attn.compressor.wkv.weight", s.head_dim, s.hidden)
            if s.ratios[layer] == 2:
                self.matrix(p + "attn.compressor.wgate.weight", s.head_dim, s.hidden)
            self.ones(p + "attn.compressor.norm.weight", s.head_dim)
            self.matrix(p + "attn.indexer.wk.weight", s.index_dim, s.head_dim)
            self.ones(p + "attn.indexer.k_norm.weight", s.index_dim)
        if layer in s.index_sources:
            self.matrix(p + "attn.indexer.wq_b.weight", s.index_heads * s.index_dim, s.q_lora)
            self.matrix(p + "attn.indexer.weights_proj.weight", s.index_heads, s.hidden)
        if layer in s.engram_layers:
            rows = s.engram_sizes[s.engram_layers.index(layer)]
            self.normal(p + "engram.embed.weight", rows, s.engram_dim, std=0.5)
            self.matrix(p + "engram.wkv.weight", (s.streams + 1) * s.hidden, s.engram_columns * s.engram_dim)
            self.ones(p + "engram.q_weight", s.streams, s.hidden)
            self.ones(p + "engram.k_weight", s.streams, s.hidden)


def initial_params(shape: Shape, seed: int = 0) -> Params:
    """Fresh parameters on the CPU."""
    init = _Init(shape, seed)
    init.normal("embed.weight", shape.vocab, shape.hidden, std=0.5)
    init.matrix("head.weight", shape.vocab, shape.hidden)
    init.ones("norm.weight", shape.hidden)
    for prefix, layer in block_prefixes(shape):
        init.block(prefix, shape.num_experts if layer is not None else shape.draft_experts)
        if layer is not None:
            init.sources(prefix, layer)
    last = f"mtp.{shape.draft_stages - 1}."
    init.matrix("mtp.0.main_proj.weight", shape.hidden, len(shape.targets) * shape.hidden)
    init.ones("mtp.0.main_norm.weight", shape.hidden)
    init.ones(last + "norm.weight", shape.hidden)
    init.normal(last + "markov_head.embed.weight", shape.vocab, shape.markov_rank, std=0.5)
    init.normal(last + "markov_head.head.weight", shape.vocab, shape.markov_rank, std=0.02)
    init.normal(last + "confidence_head.proj.weight", 1, shape.hidden + shape.markov_rank, std=0.01)
    return init.params


def stack_released(shape: Shape, tensors: Params) -> Params:
    """Logical released tensors (dequantised, any float dtype) to parameters."""
    params = {name: t.float() for name, t in tensors.items() if ".experts." not in name and ".shared_experts." not in name}
    params = {name: t for name, t in params.items() if not name.endswith("bias_vl")}
    for prefix, layer in block_prefixes(shape):
        experts = shape.num_experts if layer is not None else shape.draft_experts
        for w in ("w1", "w3", "w2"):
            names = [f"{prefix}ffn.experts.{e}.{w}.weight" for e in range(experts)] + [f"{prefix}ffn.shared_experts.{w}.weight"]
            params[f"{prefix}ffn.{w}"] = torch.stack([tensors[name].float() for name in names])
    return params


def unstack_params(shape: Shape, params: Params) -> Params:
    """The inverse of `stack_released`: released names at logical shapes, f32."""
    out = {name: t for name, t in params.items() if not name.endswith(("ffn.w1", "ffn.w3", "ffn.w2"))}
    for prefix, _ in block_prefixes(shape):
        out[prefix + "ffn.gate.bias_vl"] = params[prefix + "ffn.gate.bias"].clone()
        for w in ("w1", "w3", "w2"):
            *routed, shared = params[f"{prefix}ffn.{w}"].unbind(0)
            out |= {f"{prefix}ffn.experts.{e}.{w}.weight": t for e, t in enumerate(routed)}
            out[f"{prefix}ffn.shared_experts.{w}.weight"] = shared
    return out
