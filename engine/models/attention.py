"""Attention over a sliding window and selected compressed entries: one shared key-value vector for all heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache import KVCache
from engine.loader import WeightSource
from engine.models.config import TextConfig
from engine.models.inputs import Rows
from engine.models.numerics import Numerics
from engine.models.packed_layers import AnyBlockLinear, AnyLinear, load_block_linear, load_linear
from engine.ops.attention_inputs import attention_inputs
from engine.ops.rms_norm import rms_norm
from engine.ops.rope import rotate_
from engine.ops.row_attention import PackedKeys, row_attention
from engine.ops.sparse_attention import Selection, sparse_attention


@dataclass(frozen=True, slots=True)
class Attention:
    """wq_a_wkv: [q_lora_rank + D, C], both projections of the input in one product. wo_a: G groups of [rank, H*D/G]."""

    wq_a_wkv: AnyLinear
    wq_b: AnyLinear
    q_norm: Tensor
    kv_norm: Tensor
    sink: Tensor
    wo_a: AnyBlockLinear
    wo_b: AnyLinear
    ratio: int
    text: TextConfig
    numerics: Numerics

    @staticmethod
    def load(source: WeightSource, prefix: str, ratio: int, text: TextConfig, numerics: Numerics) -> Attention:
        """prefix: `layers.3.attn`."""
        dtype, quantize = numerics.dtype, numerics.quantize_inputs
        return Attention(
            wq_a_wkv=load_linear(source, [f"{prefix}.wq_a.weight", f"{prefix}.wkv.weight"], numerics, quantize),
            wq_b=load_linear(source, [f"{prefix}.wq_b.weight"], numerics, quantize),
            q_norm=source.tensor(f"{prefix}.q_norm.weight", dtype),
            kv_norm=source.tensor(f"{prefix}.kv_norm.weight", dtype),
            sink=source.tensor(f"{prefix}.attn_sink", torch.float32),
            wo_a=load_block_linear(source, f"{prefix}.wo_a.weight", text.o_groups, numerics),
            wo_b=load_linear(source, [f"{prefix}.wo_b.weight"], numerics, quantize),
            ratio=ratio,
            text=text,
            numerics=numerics,
        )

    def project(
        self, x: Tensor, rot: Tensor, cache: KVCache, ring: Tensor | None = None, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: [T, C]. Returns the query latent [T, q_lora_rank] and the window keys [T, ...] as rings hold them.

        ring: a ring that receives the keys at its rows `places` [T], None to store nothing.
        """
        both, eps = self.wq_a_wkv(x), self.text.rms_norm_eps
        if self.numerics.packed_rows:
            return attention_inputs(both, self.q_norm, self.kv_norm, rot, eps, ring, places)
        rank = self.text.q_lora_rank
        stored = cache.window_rows(rotate_(rms_norm(both[:, rank:], self.kv_norm, eps), rot))
        if ring is not None and places is not None:
            ring.index_copy_(0, places, stored)
        return rms_norm(both[:, :rank], self.q_norm, eps), stored

    def attend(self, latent: Tensor, rot: Tensor, inverse: Tensor, sources: list[tuple[Tensor, Selection]]) -> Tensor:
        """latent: [T, q_lora_rank]; sources: keys and which of them each row sees. Returns the sublayer's output [T, C]."""
        q = self.wq_b(latent).unflatten(-1, (self.text.num_attention_heads, self.text.head_dim))
        scale = self.text.head_dim**-0.5
        if self.numerics.packed_rows:
            o = row_attention(q, rot, [PackedKeys(keys, seen.signed) for keys, seen in sources], self.sink, scale)
        else:
            o = rotate_(sparse_attention(rotate_(q, rot), sources, self.sink, scale), inverse)
        return self.wo_b(self.wo_a(o.flatten(1)))


def window_keys(stored: Tensor, ring: Tensor, rows: Rows) -> Tensor:
    """The key rows that `rows.window` indexes when they are not the ring's, after storing the new ones. stored: [T, ...], ring: its rows.

    A chunk may be longer than the ring: its keys are then read beside the ring, and old ones before they are overwritten.
    """
    keys = ring
    if rows.history is not None:
        keys = torch.cat((ring.index_select(0, rows.history), stored)) if len(rows.history) else stored
    store_window(stored, ring, rows)
    return keys


def store_window(stored: Tensor, ring: Tensor, rows: Rows) -> None:
    """Put keys into their places of a ring. stored: [T, ...] as rings hold them."""
    ring.index_copy_(0, rows.store_slots, stored if rows.store_rows is None else stored.index_select(0, rows.store_rows))
