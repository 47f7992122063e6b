"""The model's step in native code: turns a `Batch` into one call."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.choices import Choices
from engine.config import TruncationMode
from engine.models.config import TextConfig
from engine.models.draft import DraftSlice
from engine.models.inputs import Truncation
from engine.models.native_experts import NativeExperts
from engine.models.native_share import Meeting
from engine.models.native_weights import NativeWeights
from engine.models.shared_inputs import ContextShare, Division
from engine.parallel.context_split import pieces_of
from engine.readout import Largest

# A step of so many rows computes a billion operations or more, which is worth waking threads for.
LEAST_SHARED_ROWS = 64
_COMPACT, _KEEP_TAPS = 1, 2  # flags of a step in cpu_backbone.h
_ROWS = {LogitRows.NONE: 0, LogitRows.LAST: 1, LogitRows.ALL: 2}


class NativeModel:
    """Runs steps over the cache that the weights were bound to. One thread at a time."""

    def __init__(
        self, library: ctypes.CDLL, weights: NativeWeights, text: TextConfig, block_size: int, experts: NativeExperts | None = None
    ) -> None:
        """experts: when other ranks hold some."""
        self._library, self._weights, self._text, self._experts = library, weights, text, experts
        self._block_size, self._back = block_size, text.ngram_history
        self._model = ctypes.pointer(weights.model)
        self._work = library.dix_open()
        self.vocab_size = text.vocab_size

    def set_threads(self, threads: int, least_rows: int = LEAST_SHARED_ROWS, *, polite: bool = True) -> None:
        """Threads of steps with at least `least_rows` rows; a step's numbers do not depend on them. polite: only while cores are idle."""
        self._library.dix_set_threads(self._work, threads, least_rows, int(polite))

    def __del__(self) -> None:
        self._library.dix_close(self._work)

    def step(self, batch: Batch, truncation: Truncation) -> Tensor:
        """[R, V] fp32 logits of the requested rows."""
        assert batch.late is None, "late tokens are on a device that native steps do not see"
        logits = torch.empty(sum(map(_count_rows, batch.slices)), self._text.vocab_size)
        packed = self._pack(batch, truncation)
        self._library.dix_step(self._model, self._work, packed.buffer_info()[0], logits.data_ptr())
        if self._experts is not None:
            self._experts.raise_error()
        return logits

    def step_greedy(self, batch: Batch, truncation: Truncation, num_ids: int) -> Largest:
        """The largest of the first `num_ids` logits of the requested rows."""
        assert self._experts is None, "errors of an exchange are raised by `step`"
        assert batch.late is None, "late tokens are on a device that native steps do not see"
        packed, wanted = self._pack(batch, truncation), sum(map(_count_rows, batch.slices))
        ids, values = array("i", bytes(4 * wanted)), array("f", bytes(4 * wanted))
        self._library.dix_step_greedy(
            self._model, self._work, packed.buffer_info()[0], num_ids, wanted, ids.buffer_info()[0], values.buffer_info()[0]
        )
        return Largest(ids.tolist(), values.tolist())

    def step_drawn(self, batch: Batch, truncation: Truncation, num_ids: int, choices: Choices) -> Largest:
        """The chosen ids of the requested rows, all below `num_ids`, and their largest logits."""
        assert self._experts is None, "errors of an exchange are raised by `step`"
        assert batch.late is None, "late tokens are on a device that native steps do not see"
        packed, wanted = self._pack(batch, truncation), len(choices.judged)
        assert wanted == sum(map(_count_rows, batch.slices)), f"choices of {wanted} rows"
        ids, values = array("i", bytes(4 * wanted)), array("f", bytes(4 * wanted))
        self._library.dix_step_drawn(
            self._model, self._work, packed.buffer_info()[0], num_ids, wanted, choices.packed, choices.num_seqs,
            choices.judged.buffer_info()[0], ids.buffer_info()[0], values.buffer_info()[0],
        )  # fmt: skip
        return Largest(ids.tolist(), values.tolist())

    def choose(self, logits: Tensor, choices: Choices) -> list[int]:
        """See `Drawing`."""
        return choose_rows(self._library, self._work, logits, choices)

    def step_shared(self, batch: Batch, own: range, part: Division, gathers: ContextShare, truncation: Truncation) -> Tensor:
        """One rank's share of a prompt step of several: logits of the requested rows of its own slices. Arguments: see
        `SharedInputBuilder`."""
        logits = torch.empty(len(part.own_wanted), self._text.vocab_size)
        packed, meeting = self._pack(batch, truncation), Meeting(gathers)
        group = gathers.keys.group
        pieces = array("i", pieces_of(group.rank, part.span.lens, group.size).flatten().tolist())
        self._library.dix_step_shared(
            self._model, self._work, packed.buffer_info()[0], pieces.buffer_info()[0], len(pieces) // 3, own.start, own.stop,
            meeting.function, logits.data_ptr(),
        )  # fmt: skip
        meeting.raise_error()
        if self._experts is not None:
            self._experts.raise_error()
        return logits

    def _pack(self, batch: Batch, truncation: Truncation) -> array[int]:
        # The taps of decode and verify steps wait for the next draft, if there is one.
        ints = [len(batch.slices), 0 if batch.kind is StepKind.PREFILL else _KEEP_TAPS]
        cut = batch.kind is StepKind.PREFILL and truncation.mode is not TruncationMode.OFF
        for s in batch.slices:
            rect = max(0, s.total_len - truncation.keep) if cut else 0
            if rect and truncation.mode is TruncationMode.COMPACT:
                ints[1] = _COMPACT
                self._check_kept(s, rect)
            self._append(ints, s, rect)
        return array("i", ints)

    def _append(self, ints: list[int], s: SequenceSlice, rect: int) -> None:
        length, known, back = len(s.token_ids), len(s.history), self._back
        end, size = s.start + length, self._block_size
        assert len(s.block_table) * size >= end, f"{len(s.block_table)} blocks cannot hold {end} tokens"
        assert 0 not in s.block_table[s.start // size : -(-end // size)], "a block table names the reserved block 0"
        assert known >= min(back, s.start), f"history has {known} ids, position {s.start} needs {min(back, s.start)}"
        ints += (s.start, length, s.state_slot, s.swa_valid_start, rect, s.entries_start, _ROWS[s.logit_rows], len(s.block_table))
        ints += s.block_table
        if known < back:
            ints += [-1] * (back - known)
            ints += s.history
        elif back:
            ints += s.history[known - back :]
        ints += s.token_ids

    def _check_kept(self, s: SequenceSlice, rect: int) -> None:
        first = {LogitRows.NONE: s.end, LogitRows.LAST: s.end - 1, LogitRows.ALL: s.start}[s.logit_rows]
        assert first >= min(rect, s.end), "logits wanted of a row that decoder truncation drops"

    def draft(self, slices: list[DraftSlice]) -> tuple[Tensor, Tensor]:
        """The drafted block before its tokens are chosen: states [B*N, C] and logits [B*N, V], both fp32."""
        rows = len(slices) * self._text.dspark_block_size
        states, logits = torch.empty(rows, self._text.hidden_size), torch.empty(rows, self._text.vocab_size)
        ints = _draft_ints(slices)
        self._library.dix_draft(self._model, self._work, ints.buffer_info()[0], len(slices), states.data_ptr(), logits.data_ptr())
        return states, logits

    def draft_greedy(self, slices: list[DraftSlice]) -> tuple[list[list[int]], list[list[float]]]:
        """`draft` and `propose` in one call: ids and confidences of every slice."""
        size = self._text.dspark_block_size
        rows = len(slices) * size
        ints, ids, confidence = _draft_ints(slices), array("q", bytes(8 * rows)), array("f", bytes(4 * rows))
        self._library.dix_draft_greedy(
            self._model, self._work, ints.buffer_info()[0], len(slices), ids.buffer_info()[0], confidence.buffer_info()[0]
        )
        return _blocks(ids, size), _blocks(confidence, size)

    def draft_drawn(self, slices: list[DraftSlice], choices: Choices, places: int) -> tuple[list[list[int]], list[list[float]]]:
        """As `draft_greedy`, with the first `places` ids of every slice drawn. choices: of each slice, see `compiled_drafts`."""
        size = self._text.dspark_block_size
        rows = len(slices) * size
        ints, ids, confidence = _draft_ints(slices), array("q", bytes(8 * rows)), array("f", bytes(4 * rows))
        self._library.dix_draft_drawn(
            self._model, self._work, ints.buffer_info()[0], len(slices), choices.packed, places, ids.buffer_info()[0],
            confidence.buffer_info()[0],
        )  # fmt: skip
        return _blocks(ids, size), _blocks(confidence, size)

    def propose(self, slices: list[DraftSlice], states: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy choices [B, N] int64 and confidences [B, N] fp32; each choice shifts the next place's logits, in place."""
        shape = (len(slices), self._text.dspark_block_size)
        ids, confidence = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        first = array("i", [s.token_id for s in slices])
        choices = ids.data_ptr(), confidence.data_ptr()
        self._library.dix_propose(
            self._model, self._work, states.data_ptr(), first.buffer_info()[0], len(slices), logits.data_ptr(), *choices
        )
        return ids, confidence


def choose_rows(library: ctypes.CDLL, work: int, logits: Tensor, choices: Choices) -> list[int]:
    """`Drawing.choose` in a workspace of `dix_open`."""
    count = len(choices.judged)
    assert logits.shape[0] == count, f"{logits.shape[0]} rows of logits, choices of {count}"
    assert logits.stride(1) == 1, f"logits with strides {logits.stride()}"
    ids = array("i", bytes(4 * count))
    library.dix_choose(
        work, logits.data_ptr(), logits.stride(0), logits.shape[1], choices.packed, choices.num_seqs, choices.judged.buffer_info()[0],
        ids.buffer_info()[0],
    )  # fmt: skip
    return ids.tolist()


def _draft_ints(slices: list[DraftSlice]) -> array[int]:
    return array("i", [value for s in slices for value in (s.token_id, s.position, s.state_slot, max(0, s.valid_start))])


def _blocks(values: array[Any], size: int) -> list[list[Any]]:
    return [values[i : i + size].tolist() for i in range(0, len(values), size)]


def _count_rows(s: SequenceSlice) -> int:
    if s.logit_rows is LogitRows.LAST:
        return 1
    return len(s.token_ids) if s.logit_rows is LogitRows.ALL else 0
