"""Device memory of sequences: paged compressed entries and index keys, window rings, partial groups.

A block holds the compressed entries and index keys of `block_size` tokens of every KV source layer in one byte row, so that one
copy moves a page. A state slot holds, per layer, a ring of window keys, and per ratio-2 source the last values and gates.
Block 0 and state slot 0 are dummies; their rows are zero and nobody writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from math import lcm

import torch
from torch import Tensor

from engine.models.config import TextConfig
from engine.models.numerics import Numerics


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where a block keeps what, in rows of one entry. kv rows are head_dim wide, index rows index_head_dim wide.

    kv_offset, index_offset: source layer -> first row inside a block. kv_stride, index_stride: rows from block to block.
    """

    block_size: int
    block_bytes: int
    kv_stride: int
    index_stride: int
    kv_offset: dict[int, int]
    index_offset: dict[int, int]

    @staticmethod
    def of(text: TextConfig, block_size: int, element_bytes: int) -> BlockLayout:
        kv_bytes, index_bytes = text.head_dim * element_bytes, text.index_head_dim * element_bytes
        entries = {layer: block_size // text.ratio(layer) for layer in text.kv_source_layer_ids}
        kv_offset, rows = _running(entries, 0)
        index_offset, end = _running(entries, -(-rows * kv_bytes // index_bytes))
        # Both views must tile the row exactly, so that a row number is block * stride + offset.
        unit = lcm(kv_bytes, index_bytes)
        block_bytes = max(unit, -(-end * index_bytes // unit) * unit)
        return BlockLayout(block_size, block_bytes, block_bytes // kv_bytes, block_bytes // index_bytes, kv_offset, index_offset)


def _running(entries: dict[int, int], first: int) -> tuple[dict[int, int], int]:
    offsets = {}
    for layer, count in entries.items():
        offsets[layer] = first
        first += count
    return offsets, first


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a cache. backtracking_tokens: positions a step may write beyond the committed end (B)."""

    block_size: int
    num_blocks: int
    num_state_slots: int
    backtracking_tokens: int
    keep_tokens: int = 0
    num_draft_stages: int = 0

    def ring_rows(self, window: int) -> int:
        """Rows of a ring: both window states of a finished prefill stay extractable, and B positions may be rolled back."""
        return window + self.backtracking_tokens + self.block_size + self.keep_tokens

    @property
    def partial_rows(self) -> int:
        """Positions of which a ratio-2 source keeps value and gate: one group and everything that may be rolled back."""
        return 2 + max(0, self.backtracking_tokens - 1)


class KVCache:
    """The tensors of all sequences of one rank. Values only; who owns which block or slot is the scheduler's business.

    blocks: uint8 [num_blocks, block_bytes]. rings: [layers + stages, num_state_slots * ring_rows, head_dim]; position p of slot s is row
    s * ring_rows + p % ring_rows. partials: source layer -> fp32 [num_state_slots * partial_rows, 2 * head_dim], values then gates.
    """

    def __init__(self, text: TextConfig, numerics: Numerics, shape: CacheShape, device: torch.device | str = "cpu") -> None:
        element_bytes = numerics.dtype.itemsize
        self.block_size, self.num_blocks, self.num_state_slots = shape.block_size, shape.num_blocks, shape.num_state_slots
        self.window = text.sliding_window
        self.ring_rows, self.partial_rows = shape.ring_rows(self.window), shape.partial_rows
        self.num_encoder_layers = text.boundary
        self.layout = BlockLayout.of(text, shape.block_size, element_bytes)
        # Untouched pages of a CPU pool cost no memory, hence empty and not zeros.
        self.blocks = torch.empty(shape.num_blocks, self.layout.block_bytes, dtype=torch.uint8, device=device)
        self.kv_rows = self.blocks.view(numerics.dtype).view(-1, text.head_dim)
        self.index_rows = self.blocks.view(numerics.dtype).view(-1, text.index_head_dim)
        num_rings = text.num_hidden_layers + shape.num_draft_stages
        self.rings = torch.empty(num_rings, shape.num_state_slots * self.ring_rows, text.head_dim, dtype=numerics.dtype, device=device)
        self.partials = {
            layer: torch.empty(shape.num_state_slots * self.partial_rows, 2 * text.head_dim, device=device)
            for layer in text.kv_source_layer_ids
            if text.ratio(layer) == 2
        }
        # Absent entries of a selection point at row 0, which therefore has to be finite.
        self.blocks[0].zero_()
        self.rings[:, : self.ring_rows].zero_()
        self.state_bytes = self.num_encoder_layers * self.window * text.head_dim * element_bytes
        self.format_id = _format_id(text, numerics, shape.block_size)

    def save_window(self, slot: int, position: int, out: Tensor) -> None:
        """Copy the encoder layers' keys of positions [position - window, position) to `out`, uint8 [state_bytes]; zeros before 0."""
        rows, absent = self._window_rows(slot, position)
        state = self.rings[: self.num_encoder_layers].index_select(1, rows)
        state[:, :absent] = 0
        out.copy_(state.view(torch.uint8).flatten(), non_blocking=True)

    def load_window(self, slot: int, position: int, src: Tensor) -> None:
        """Put a window that `save_window` took at `position` into `slot`. src: uint8 [state_bytes], on any device."""
        rows, absent = self._window_rows(slot, position)
        state = src.to(self.rings.device).view(self.rings.dtype).view(self.num_encoder_layers, self.window, -1)
        self.rings[: self.num_encoder_layers].index_copy_(1, rows[absent:], state[:, absent:])

    def _window_rows(self, slot: int, position: int) -> tuple[Tensor, int]:
        """Ring rows of the window before `position`, and how many of its positions are negative."""
        assert 0 < slot < self.num_state_slots, f"state slot {slot} of {self.num_state_slots}"
        positions = torch.arange(position - self.window, position, device=self.rings.device)
        return slot * self.ring_rows + positions % self.ring_rows, max(0, self.window - position)


def block_bytes(text: TextConfig, numerics: Numerics, block_size: int) -> int:
    """Bytes of one cache block."""
    return BlockLayout.of(text, block_size, numerics.dtype.itemsize).block_bytes


def _format_id(text: TextConfig, numerics: Numerics, block_size: int) -> str:
    """Names everything that decides the bytes of a page and of a window state."""
    layers = [(layer, text.ratio(layer)) for layer in text.kv_source_layer_ids]
    rope = (text.qk_rope_head_dim, text.rope_theta, text.compress_rope_theta, text.rope_scaling)
    digest = sha256(repr((layers, rope, text.sliding_window, text.boundary)).encode()).hexdigest()[:12]
    kind = str(numerics.dtype).removeprefix("torch.") + ("-rounded" if numerics.quantize_kv else "")
    return f"{kind}:kv{text.head_dim}:index{text.index_head_dim}:block{block_size}:{digest}"
