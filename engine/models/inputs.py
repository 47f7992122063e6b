"""From a `Batch` of host data to the tensors that all layers of one step share.

Everything a layer needs to find its keys is an index tensor built here once: rings and blocks are never walked token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, LateTokens, LogitRows, StepKind
from engine.config import TruncationMode
from engine.kv_cache import KVCache
from engine.models.config import TextConfig
from engine.ops.engram_hash import DEAD
from engine.ops.rope import rotation
from engine.ops.sparse_attention import Selection
from engine.readout import to_device

if TYPE_CHECKING:
    from engine.models.shared_inputs import ContextShare

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Decoder truncation of a prefill step. keep: suffix tokens that decoder layers still see."""

    mode: TruncationMode = TruncationMode.OFF
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Rotations:
    """Unit complex numbers [T, R/2] for both rotary tables, and their conjugates for the inverse."""

    plain: Tensor
    scaled: Tensor
    plain_inverse: Tensor
    scaled_inverse: Tensor

    def of(self, ratio: int) -> Tensor:
        return self.scaled if ratio else self.plain

    def inverse_of(self, ratio: int) -> Tensor:
        return self.scaled_inverse if ratio else self.plain_inverse


@dataclass(frozen=True, slots=True)
class Rows:
    """The query rows of a run of layers, and where their window keys are.

    positions, seq: [T] int64. bounds: (begin, end) of every sequence's rows. history: ring rows to load in front of the new keys, or None
    when all keys are read from the ring after storing. window: rows of [history | new keys], or of the ring. store_rows: new keys to
    write (None: all), store_slots: their ring rows. visible: ratio -> entries each row can see.
    """

    positions: Tensor
    seq: Tensor
    bounds: list[tuple[int, int]]
    rotations: Rotations
    history: Tensor | None
    window: Selection
    store_rows: Tensor | None
    store_slots: Tensor
    visible: dict[int, Tensor]

    def __len__(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The two tokens of each new entry of ratio 2.

    load: partial rows to put in front of the chunk's rows, or None. first: rows of that whole, last: rows of the chunk.
    store_rows: chunk rows to keep for later steps, store_slots: their partial rows.
    """

    load: Tensor | None
    first: Tensor
    last: Tensor
    store_rows: Tensor
    store_slots: Tensor


@dataclass(frozen=True, slots=True)
class NewEntries:
    """Compressed entries that this step completes, for one ratio.

    block, place: [E] int64, where each goes: a block, and the entry's number in it. rot: [E, R/2] at each entry's first token.
    """

    block: Tensor
    place: Tensor
    rot: Tensor
    pairs: Pairs | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step. encoder rows are the rows of the batch; decoder rows are the kept ones, the same object without truncation.

    share: when several ranks compute the step's rows together; the rows here are then those of this rank, and keys, entries and
    block table those of the whole batch.
    """

    token_ids: Tensor
    grams: Tensor
    block_table: Tensor
    encoder: Rows
    decoder: Rows
    kept: Tensor | None
    entries: dict[int, NewEntries]
    max_visible: dict[int, int]
    logit_rows: Tensor
    share: ContextShare | None = None


def fill_late(late: LateTokens, token_ids: Tensor, grams: Tensor, token_map: Tensor) -> None:
    """Put late tokens into a step's inputs, on the device. token_ids: [T], grams: [T, G] with the newest first; token_map: [V]."""
    rows = to_device(late.rows, torch.int64, token_ids.device)
    known, ids = rows < 0, late.ids[rows.clamp(min=0)]
    token_ids.copy_(torch.where(known, token_ids, ids))
    grams[:, 0] = torch.where(known, grams[:, 0], token_map[ids])


class InputBuilder:
    """Builds `StepInputs` for one model and cache. Holds the rotary frequencies and the token map."""

    def __init__(self, text: TextConfig, cache: KVCache, token_map: list[int], plain: Tensor, scaled: Tensor) -> None:
        self._text, self._cache = text, cache
        self._map = np.array(token_map, dtype=np.int64)
        self._plain, self._scaled = plain, scaled
        self._device = plain.device
        self._device_map = torch.tensor(token_map, device=self._device)
        self._ratios = sorted({text.ratio(layer) for layer in text.kv_source_layer_ids})

    def build(self, batch: Batch, truncation: Truncation) -> StepInputs:
        """The tensors of one step. Decode and verify steps are never truncated."""
        slices = batch.slices
        if batch.kind is not StepKind.PREFILL:
            truncation = Truncation()
        span, slots, floor, rect = self._spans(batch, truncation)
        in_place = batch.kind is not StepKind.PREFILL
        encoder = self._rows(span, slots, floor, np.zeros_like(rect), in_place)
        decoder, kept = encoder, None
        if rect.any():
            decoder, kept = self._decoder_rows(span, slots, floor, rect, truncation.mode)
        table = self._block_table([s.block_table for s in slices])
        token_ids, grams = self._tensor(np.concatenate([np.array(s.token_ids, dtype=np.int64) for s in slices])), self._grams(batch)
        if batch.late is not None:
            fill_late(batch.late, token_ids, grams, self._device_map)
        return StepInputs(
            token_ids=token_ids,
            grams=grams,
            block_table=self._tensor(table),
            encoder=encoder,
            decoder=decoder,
            kept=None if kept is None else self._tensor(kept),
            entries={r: self._entries(r, span, slots, table, entries_start(batch)) for r in self._ratios},
            max_visible={r: int(span.ends.max()) // r for r in self._ratios},
            logit_rows=self._tensor(logit_rows(batch, span, kept)),
        )

    def _spans(self, batch: Batch, truncation: Truncation) -> tuple[Span, Ints, Ints, Ints]:
        """Rows of all sequences, and per sequence: state slot, first valid window position, first position that decoder layers see."""
        slices = batch.slices
        for s in slices:
            assert len(s.block_table) * self._cache.block_size >= s.end, f"{len(s.block_table)} blocks cannot hold {s.end} tokens"
        rect = np.zeros(len(slices), dtype=np.int64)
        if truncation.mode is not TruncationMode.OFF:
            rect = np.array([max(0, s.total_len - truncation.keep) for s in slices], dtype=np.int64)
        return (
            Span.of([s.start for s in slices], [s.end for s in slices]),
            np.array([s.state_slot for s in slices], dtype=np.int64),
            np.array([s.swa_valid_start for s in slices], dtype=np.int64),
            rect,
        )

    def _decoder_rows(self, span: Span, slots: Ints, floor: Ints, rect: Ints, mode: TruncationMode) -> tuple[Rows, Ints | None]:
        if mode is TruncationMode.MASK:
            return self._rows(span, slots, floor, rect, in_place=False), None
        kept = (span.positions >= rect[span.seq]).nonzero()[0]
        # A sequence whose chunk lies wholly before its kept suffix has no rows here; its span is empty.
        starts = np.minimum(np.maximum(span.starts, rect), span.ends)
        return self._rows(Span.of(starts, span.ends), slots, floor, rect, in_place=False), kept

    def _rows(self, span: Span, slots: Ints, floor: Ints, rect: Ints, in_place: bool, pick: Ints | None = None) -> Rows:
        """pick: batch rows that ask, sequence by sequence, when other ranks compute the rest; new keys are always those of all rows."""
        window, ring = self._cache.window, self._cache.ring_rows
        pos, seq = span.positions, span.seq
        store = (pos >= np.maximum(span.ends - ring, rect)[seq]).nonzero()[0]
        store_slots = (slots[seq] * ring + pos % ring)[store]
        store_rows = None if len(store) == len(pos) else self._tensor(store)
        if pick is not None:
            pos, seq = pos[pick], seq[pick]
        lowest = np.maximum(pos - window + 1, np.maximum(rect, floor)[seq])
        keys = pos[:, None] + np.arange(1 - window, 1)
        visible = keys >= np.maximum(lowest, 0)[:, None]
        history = None
        if in_place:
            index = slots[seq][:, None] * ring + keys % ring
        else:
            past = span.starts[:, None] + np.arange(1 - window, 0)
            valid = past >= np.maximum(rect, floor)[:, None]
            loads = np.where(valid, slots[:, None] * ring + past % ring, 0) if valid.any() else np.zeros((0, window - 1), dtype=np.int64)
            history = self._tensor(loads.flatten())
            offset = (span.begins - span.starts + loads.size)[seq][:, None]
            old = (seq * (window - 1) - span.starts[seq] + window - 1)[:, None]
            index = keys + np.where(keys >= span.starts[seq][:, None], offset, old)
        positions = self._tensor(pos)
        ends = np.cumsum(np.bincount(seq, minlength=len(slots)))
        return Rows(
            positions=positions,
            seq=self._tensor(seq),
            bounds=list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)),
            rotations=self._rotations(positions),
            history=history,
            window=Selection(torch.from_numpy(np.where(visible, index, -1).astype(np.int32)).to(self._device)),
            store_rows=store_rows,
            store_slots=self._tensor(store_slots),
            visible={r: (positions + 1).div(r, rounding_mode="floor") for r in self._ratios},
        )

    def _rotations(self, positions: Tensor) -> Rotations:
        plain, scaled = rotation(positions, self._plain), rotation(positions, self._scaled)
        return Rotations(plain, scaled, plain.conj_physical(), scaled.conj_physical())

    def _entries(self, ratio: int, span: Span, slots: Ints, table: Ints, first_new: Ints) -> NewEntries:
        """first_new: [B] the positions from which on entries are written; those before go to the dummy block instead."""
        pos, seq = span.positions, span.seq
        last = (pos % ratio == ratio - 1).nonzero()[0]
        entry, owner = pos[last] // ratio, seq[last]
        per_block = self._cache.block_size // ratio
        block = table[owner, entry // per_block]
        assert not len(block) or block.min() > 0, "a block table names the reserved block 0"
        block = np.where(pos[last] < first_new[owner], 0, block)
        common = (
            self._tensor(block),
            self._tensor(entry % per_block),
            rotation(self._tensor(entry * ratio), self._scaled),
        )
        if ratio == 1:
            return NewEntries(*common)
        partial = self._cache.partial_rows
        split = pos[last] == span.starts[owner]
        store = (pos >= (span.ends - partial)[seq]).nonzero()[0]
        stored = self._tensor((slots[seq] * partial + pos % partial)[store])
        load = None
        first = last - 1
        if split.any():
            load = self._tensor(slots * partial + (span.starts - 1) % partial)
            first = np.where(split, owner, first + len(slots))
        return NewEntries(*common, Pairs(load, self._tensor(first), self._tensor(last), self._tensor(store), stored))

    def _grams(self, batch: Batch) -> Tensor:
        """[T, G] compressed ids: column s is the id s positions back, DEAD before the sequence."""
        back = self._text.ngram_history
        parts = []
        for s in batch.slices:
            known = len(s.history)
            assert known >= min(back, s.start), f"history has {known} ids, position {s.start} needs {min(back, s.start)}"
            ids = self._map[np.array([*s.history[known - min(back, known) :], *s.token_ids], dtype=np.int64)]
            ids = np.concatenate([np.full(back - min(back, known), DEAD), ids])
            parts.append(np.lib.stride_tricks.sliding_window_view(ids, back + 1)[:, ::-1])
        return self._tensor(np.concatenate(parts))

    def _block_table(self, tables: list[list[int]]) -> Ints:
        result = np.zeros((len(tables), max(1, max(len(t) for t in tables))), dtype=np.int64)
        for row, blocks in zip(result, tables, strict=True):
            row[: len(blocks)] = blocks
        return result

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of several sequences back to back: per sequence [B], per row [T]."""

    starts: Ints
    ends: Ints
    lens: Ints
    begins: Ints
    positions: Ints
    seq: Ints

    @staticmethod
    def of(starts: list[int] | Ints, ends: list[int] | Ints) -> Span:
        first, end = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
        lens = end - first
        begins = np.cumsum(lens) - lens
        seq = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(lens.sum()) + (first - begins)[seq]
        return Span(first, end, lens, begins, positions, seq)


def entries_start(batch: Batch) -> Ints:
    """[B]: the field of that name of every slice."""
    return np.array([s.entries_start for s in batch.slices], dtype=np.int64)


def logit_rows(batch: Batch, span: Span, kept: Ints | None) -> Ints:
    """Rows of the last layers' output whose logits are wanted."""
    wanted: list[Ints] = []
    for s, begin, count in zip(batch.slices, span.begins, span.lens, strict=True):
        if s.logit_rows is LogitRows.ALL:
            wanted.append(np.arange(begin, begin + count))
        elif s.logit_rows is LogitRows.LAST:
            wanted.append(np.array([begin + count - 1]))
    rows = np.concatenate(wanted) if wanted else np.zeros(0, dtype=np.int64)
    if kept is None:
        return rows
    assert np.isin(rows, kept).all(), "logits wanted of a row that decoder truncation drops"
    return np.searchsorted(kept, rows)
