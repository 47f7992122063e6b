"""Sizes of a model, read from a `config.json`, and the constants that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and layer lists that the training model reads. Field names are those of `text_config`, shortened where obvious."""

    vocab: int
    hidden: int
    num_layers: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    moe_inter: int
    num_experts: int
    top_k: int
    swiglu_limit: float
    routed_scale: float
    window: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int
    candidate_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_theta: float
    yarn: tuple[float, float, float, float]
    hc_iters: int
    hc_eps: float
    streams: int
    engram_layers: tuple[int, ...]
    engram_sizes: tuple[int, ...]
    engram_vocab: int
    engram_heads: int
    engram_dim: int
    engram_max_ngram: int
    engram_pad: int
    engram_compressed_vocab: int
    draft_stages: int
    draft_block: int
    noise_id: int
    targets: tuple[int, ...]
    markov_rank: int
    draft_experts: int
    draft_top_k: int

    @property
    def boundary(self) -> int:
        """First decoder layer: the first with ratio 1."""
        return self.ratios.index(1)

    def kv_owner(self, layer: int) -> int:
        return max(source for source in self.kv_sources if source <= layer)

    def topk_owner(self, layer: int) -> int:
        return max(source for source in self.index_sources if source <= layer)

    @property
    def engram_columns(self) -> int:
        return (self.engram_max_ngram - 1) * self.engram_heads


def shape_from_config(config: dict[str, Any]) -> Shape:
    """Read a released-format `config.json`. Raises KeyError for a missing field."""
    t = config["text_config"]
    yarn = t["rope_scaling"]
    return Shape(
        vocab=t["vocab_size"],
        hidden=t["hidden_size"],
        num_layers=t["num_hidden_layers"],
        heads=t["num_attention_heads"],
        head_dim=t["head_dim"],
        rope_dim=t["qk_rope_head_dim"],
        q_lora=t["q_lora_rank"],
        o_groups=t["o_groups"],
        o_lora=t["o_lora_rank"],
        moe_inter=t["moe_intermediate_size"],
        num_experts=t["n_routed_experts"],
        top_k=t["num_experts_per_tok"],
        swiglu_limit=t["swiglu_limit"],
        routed_scale=t["routed_scaling_factor"],
        window=t["sliding_window"],
        ratios=tuple(t["compress_ratios"]),
        kv_sources=tuple(t["kv_source_layer_ids"]),
        index_sources=tuple(t["index_source_layer_ids"]),
        index_heads=t["index_n_heads"],
        index_dim=t["index_head_dim"],
        index_topk=t["index_topk"],
        candidate_source=t["candidate_source_layer_id"],
        candidate_blocks=t["candidate_topk_blocks"],
        candidate_block_size=t["candidate_block_size"],
        rope_theta=float(t["rope_theta"]),
        compress_theta=float(t["compress_rope_theta"]),
        yarn=(yarn["factor"], yarn["beta_fast"], yarn["beta_slow"], yarn["original_max_position_embeddings"]),
        hc_iters=t["hc_sinkhorn_iters"],
        hc_eps=t["hc_eps"],
        streams=t["hc_mult"],
        engram_layers=tuple(t["engram_layer_ids"]),
        engram_sizes=tuple(t["engram_num_embeddings"]),
        engram_vocab=t["engram_vocab_size"],
        engram_heads=t["engram_n_heads"],
        engram_dim=t["engram_head_dim"],
        engram_max_ngram=t["engram_max_ngram_size"],
        engram_pad=t["engram_pad_token_id"],
        engram_compressed_vocab=t["engram_compressed_vocab_size"],
        draft_stages=t["num_nextn_predict_layers"],
        draft_block=t["dspark_block_size"],
        noise_id=t["dspark_noise_token_id"],
        targets=tuple(t["dspark_target_layer_ids"]),
        markov_rank=t["dspark_markov_rank"],
        draft_experts=t["dspark_n_routed_experts"],
        draft_top_k=t["dspark_num_experts_per_tok"],
    )


def rope_frequencies(shape: Shape, ratio: int) -> Tensor:
    """Angles per position, [rope_dim / 2] f32. Layers with ratio > 0 use the compressed base with YaRN always on.

    Source: config keys `rope_theta`, `compress_rope_theta`, `rope_scaling`.
    """
    dim = shape.rope_dim
    base = shape.compress_theta if ratio else shape.rope_theta
    freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if not ratio:
        return freq
    factor, fast, slow, original = shape.yarn
    low, high = (dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return (freq / factor) * ramp + freq * (1 - ramp)
