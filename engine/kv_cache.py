"""Device memory of sequences: paged compressed entries and index keys, window rings, partial groups.

A block holds the compressed entries and index keys of `block_size` tokens of every KV source layer in one byte row, so that one
copy moves a page. A state slot holds, per layer, a ring of window keys, and per ratio-2 source the last values and gates.
Block 0 and state slot 0 are dummies: nobody reads what is written there, which is always finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from engine.cache_layout import BlockLayout, RowSizes
from engine.models.config import TextConfig
from engine.models.numerics import Numerics
from engine.ops.cache_rows import pack_entry_rows, pack_index_rows, pack_window_rows, unpack_index_rows
from engine.ops.compress_entries import IndexPlaces
from engine.ops.q4_index import q4_index
from engine.ops.q4_kv import q4_kv
from engine.ops.q8 import q8


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

    blocks: uint8 [num_blocks, block_bytes]. kv_rows: [rows, head_dim] of the profile's dtype, or uint8 [rows, entry bytes] when packed.
    rings: [layers + stages, num_state_slots * ring_rows, head_dim], or uint8 [..., window bytes] when packed; position p of slot s is row
    s * ring_rows + p % ring_rows. partials: source layer -> fp32 [num_state_slots * partial_rows, 2 * head_dim], values then gates.
    taps: fp32 [num_state_slots, window + drafts + 1, targets * hidden], inputs that the draft stages have not read yet; the compiled step
    keeps them, so None where it cannot run.
    """

    def __init__(self, text: TextConfig, numerics: Numerics, shape: CacheShape, device: torch.device | str = "cpu") -> None:
        self.numerics, self.row_sizes = numerics, RowSizes.of(text, numerics)
        self.block_size, self.num_blocks, self.num_state_slots = shape.block_size, shape.num_blocks, shape.num_state_slots
        self.window = text.sliding_window
        self.ring_rows, self.partial_rows = shape.ring_rows(self.window), shape.partial_rows
        self.num_encoder_layers = text.boundary
        self.layout = BlockLayout.of(text, shape.block_size, self.row_sizes)
        # Untouched pages of a CPU pool cost no memory, hence empty and not zeros.
        self.blocks = torch.empty(shape.num_blocks, self.layout.block_bytes, dtype=torch.uint8, device=device)
        stored = torch.uint8 if numerics.packed_rows else numerics.dtype
        self.kv_rows = self.blocks.view(stored).view(-1, self.row_sizes.entry // stored.itemsize)
        num_rings = text.num_hidden_layers + shape.num_draft_stages
        ring = (shape.num_state_slots * self.ring_rows, self.row_sizes.window // stored.itemsize)
        self.rings = torch.empty(num_rings, *ring, dtype=stored, device=device)
        self.partials = {
            layer: torch.empty(shape.num_state_slots * self.partial_rows, 2 * text.head_dim, device=device)
            for layer in text.kv_source_layer_ids
            if text.ratio(layer) == 2
        }
        self.taps: Tensor | None = None
        if shape.num_draft_stages and self.rings.device.type == "cpu" and stored is torch.float32:
            places = self.window + text.dspark_block_size + 1
            self.taps = torch.empty(shape.num_state_slots, places, len(text.dspark_target_layer_ids) * text.hidden_size)
        # Absent entries of a selection point at row 0, which therefore has to be finite; padding computes it anew from what slot 0 holds.
        self.blocks[0].zero_()
        self.rings[:, : self.ring_rows].zero_()
        for partials in self.partials.values():
            partials[: self.partial_rows].zero_()
        self.state_bytes = self.num_encoder_layers * self.window * self.row_sizes.window
        self.format_id = _format_id(text, numerics, shape.block_size)

    def window_rows(self, keys: Tensor) -> Tensor:
        """Window keys [T, D] in the form in which rings hold them."""
        if self.numerics.packed_rows:
            return pack_window_rows(keys)
        return q8(keys) if self.numerics.quantize_kv else keys

    def entry_rows(self, layer: int, block: Tensor, place: Tensor) -> Tensor:
        """Rows of `kv_rows` of entries of a source layer. block, place: [E] int64."""
        return block * self.layout.kv_stride + (place + self.layout.kv_offset[layer])

    def index_places(self, layer: int, block: Tensor, place: Tensor) -> IndexPlaces:
        """Where packed index keys of a source layer go. block, place: [E] int64."""
        return IndexPlaces(self.blocks, self.layout.index_offset[layer], self.layout.entries[layer], block, place)

    def store_entries(self, layer: int, block: Tensor, place: Tensor, entries: Tensor, keys: Tensor) -> None:
        """Write rotated compressed entries [E, D] and index keys [E, Di] to plain rows. block, place: [E] int64."""
        assert not self.numerics.packed_rows, "packed rows are written by `compress_entries`"
        if self.numerics.quantize_kv:
            entries, keys = q4_kv(entries), q4_index(keys)
        self.kv_rows.index_copy_(0, self.entry_rows(layer, block, place), entries)
        layout = self.layout
        self.index_rows.index_copy_(0, block * layout.index_stride + (place + layout.index_offset[layer]), keys)

    def fill_entries(self, layer: int, block: Tensor, place: Tensor, entries: Tensor, keys: Tensor) -> None:
        """`store_entries` for rows of either form: for contents that no compressor made."""
        if not self.numerics.packed_rows:
            self.store_entries(layer, block, place, entries, keys)
            return
        self.kv_rows.index_copy_(0, self.entry_rows(layer, block, place), pack_entry_rows(entries))
        data, scales = self._index_region(layer)
        packed = pack_index_rows(keys)
        data[block, place], scales[block, place] = packed[:, : data.shape[-1]], packed[:, data.shape[-1] :]

    def index_keys(self, layer: int, blocks: Tensor, num_entries: int) -> Tensor:
        """Index keys [B, num_entries, Di] of a source layer, of the profile's dtype. blocks: [B, P] int64, each sequence's in order."""
        layout = self.layout
        per_block = layout.entries[layer]
        if self.numerics.packed_rows:
            # Data and scales lie apart in a block; joined per entry they are an index row.
            rows = torch.cat([region[blocks].flatten(1, 2)[:, :num_entries] for region in self._index_region(layer)], -1)
            return unpack_index_rows(rows, self.numerics.dtype)
        base = blocks * layout.index_stride + layout.index_offset[layer]
        index = (base[:, :, None] + torch.arange(per_block, device=blocks.device)).flatten(1)[:, :num_entries]
        return self.index_rows.index_select(0, index.flatten()).view(*index.shape, -1)

    @property
    def index_rows(self) -> Tensor:
        """[rows, index_head_dim] of the profile's dtype. Packed index rows are in pieces and have no such view."""
        assert not self.numerics.packed_rows, "packed index rows have no row view"
        return self.blocks.view(self.numerics.dtype).view(-1, self.row_sizes.index // self.numerics.dtype.itemsize)

    def _index_region(self, layer: int) -> tuple[Tensor, Tensor]:
        """Packed index keys of a layer: data uint8 [num_blocks, entries, Di/2] and scales uint8 [num_blocks, entries, Di/32]."""
        begin, count = self.layout.index_offset[layer], self.layout.entries[layer]
        middle, end = begin + count * self.row_sizes.index_data, begin + count * self.row_sizes.index
        data, scales = self.blocks[:, begin:middle], self.blocks[:, middle:end]
        return data.unflatten(1, (count, -1)), scales.unflatten(1, (count, -1))

    def save_window(self, slot: int, position: int, out: Tensor) -> None:
        """Copy the encoder layers' keys of positions [position - window, position) to `out`, uint8 [state_bytes]; zeros before 0."""
        rows, absent = self._window_rows(slot, position)
        state = self.rings[: self.num_encoder_layers].index_select(1, rows)
        state[:, :absent] = 0
        out.copy_(state.view(torch.uint8).flatten(), non_blocking=True)

    def load_window(self, slot: int, position: int, src: Tensor) -> None:
        """Put a window that `save_window` took at `position` into `slot`. src: uint8 [state_bytes], on any device."""
        rows, absent = self._window_rows(slot, position)
        state = src.to(self.rings.device).view(self.rings.dtype).view(self.num_encoder_layers, self.window, self.rings.shape[-1])
        self.rings[: self.num_encoder_layers].index_copy_(1, rows[absent:], state[:, absent:])

    def _window_rows(self, slot: int, position: int) -> tuple[Tensor, int]:
        """Ring rows of the window before `position`, and how many of its positions are negative."""
        assert 0 < slot < self.num_state_slots, f"state slot {slot} of {self.num_state_slots}"
        positions = torch.arange(position - self.window, position, device=self.rings.device)
        return slot * self.ring_rows + positions % self.ring_rows, max(0, self.window - position)


def block_bytes(text: TextConfig, numerics: Numerics, block_size: int) -> int:
    """Bytes of one cache block."""
    return BlockLayout.of(text, block_size, RowSizes.of(text, numerics)).block_bytes


def _format_id(text: TextConfig, numerics: Numerics, block_size: int) -> str:
    """Names everything that decides the bytes of a page and of a window state."""
    layers = [(layer, text.ratio(layer)) for layer in text.kv_source_layer_ids]
    rope = (text.qk_rope_head_dim, text.rope_theta, text.compress_rope_theta, text.rope_scaling)
    digest = sha256(repr((layers, rope, text.sliding_window, text.boundary)).encode()).hexdigest()[:12]
    kind = str(numerics.dtype).removeprefix("torch.")
    if numerics.packed_rows:
        kind += "-packed"
    elif numerics.quantize_kv:
        kind += "-rounded"
    return f"{kind}:kv{text.head_dim}:index{text.index_head_dim}:block{block_size}:{digest}"
