"""The least bytes and operations that one layer of a configuration needs for a step. Source: the layer's stored tensors and row formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from engine.models.config import ModelConfig
from engine.models.inventory import StoredTensor, stored_inventory
from engine.ops.cache_rows import entry_row_bytes, index_row_bytes, window_row_bytes


@dataclass(frozen=True, slots=True)
class LayerFloor:
    """dense_bytes: stored weights that every step reads. expert_bytes: of one routed expert. row_bytes: cache rows of one query row.
    dense_weights, expert_weights: numbers behind those bytes. attention_flops: of one query row, indexer included.
    """

    dense_bytes: int
    expert_bytes: int
    row_bytes: int
    dense_weights: int
    expert_weights: int
    attention_flops: int
    num_chosen: int

    def num_bytes(self, rows: int, touched: float) -> float:
        """Bytes of a decode step of `rows` rows whose rows chose `touched` distinct experts."""
        return self.dense_bytes + touched * self.expert_bytes + rows * self.row_bytes

    def flops(self, rows: int) -> float:
        return rows * (2.0 * (self.dense_weights + self.num_chosen * self.expert_weights) + self.attention_flops)


@lru_cache(maxsize=4)
def _by_layer(config: ModelConfig) -> dict[int, list[StoredTensor]]:
    """The tensors of every backbone layer but n-gram tables. A model of 40 layers has a quarter of a million, listed once."""
    found: dict[int, list[StoredTensor]] = {}
    for tensor in stored_inventory(config).values():
        if tensor.name.startswith("layers.") and "engram.embed" not in tensor.name:
            found.setdefault(int(tensor.name.split(".", 2)[1]), []).append(tensor)
    return found


@lru_cache(maxsize=1024)
def layer_floor(config: ModelConfig, layer: int, context: int) -> LayerFloor:
    """The floor of one backbone layer for rows at the end of `context` tokens."""
    text, tensors = config.text, _by_layer(config)[layer]
    experts = [t for t in tensors if ".ffn.experts." in t.name]
    dense = [t for t in tensors if ".ffn.experts." not in t.name]
    ratio = text.ratio(layer)
    visible = context // ratio if ratio else 0
    indexes = layer in text.index_source_layer_ids
    scored = min(visible, text.candidate_topk_blocks * text.candidate_block_size) if text.uses_candidates(layer) else visible
    selected = min(text.index_topk, visible)
    rows = text.sliding_window * window_row_bytes(text.head_dim) + selected * entry_row_bytes(text.head_dim)
    flops = 4 * text.num_attention_heads * text.head_dim * (text.sliding_window + selected)
    if indexes:
        rows += scored * index_row_bytes(text.index_head_dim)
        flops += 2 * text.index_n_heads * text.index_head_dim * scored
    return LayerFloor(
        dense_bytes=sum(t.num_bytes for t in dense),
        expert_bytes=sum(t.num_bytes for t in experts) // text.n_routed_experts,
        row_bytes=rows,
        dense_weights=_weights(dense),
        expert_weights=_weights(experts) // text.n_routed_experts,
        attention_flops=flops,
        num_chosen=text.num_experts_per_tok,
    )


def _weights(tensors: Sequence[StoredTensor]) -> int:
    """Numbers held, scales aside; an I8 tensor packs two into a byte."""
    return sum(prod(t.shape) * (2 if t.dtype == "I8" else 1) for t in tensors if not t.name.endswith(".scale"))
