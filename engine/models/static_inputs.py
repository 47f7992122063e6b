"""Inputs of decode and verify steps at fixed shapes and addresses, for steps that are recorded once and replayed.

The host sends a few integers per row and the changes of block tables; everything else that layers need to find their keys is computed
from them on the device, as part of the step. A row knows its own sequence: rows of one sequence are those of one state slot.
Padding rows stand at position 0 of slot 0, whose block table names the dummy block 0: whatever they write, no sequence reads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.kv_cache import KVCache
from engine.models.config import TextConfig
from engine.models.inputs import NewEntries, Pairs, Rotations, Rows, StepInputs, fill_late
from engine.models.row_buffers import DeviceTables, StagedRows
from engine.ops.engram_hash import DEAD
from engine.ops.rope import rotation
from engine.ops.sparse_attention import Selection

# Columns of a row in front of its n-gram ids. floor: first position with a valid window row; joined: 1 when the row above is the
# position before of the same sequence.
_TOKEN, _POSITION, _SLOT, _FLOOR, _JOINED, _GRAMS = range(6)


class StaticInputs:
    """Holds the device buffers of one runner. `load` fills them, `step_inputs` reads them and may be part of a recorded step."""

    def __init__(
        self, text: TextConfig, cache: KVCache, token_map: list[int], frequencies: tuple[Tensor, Tensor], max_rows: int, max_len: int
    ) -> None:
        """frequencies: [R/2] of the plain and the scaled rotary table. max_len: positions that a sequence may reach in a step."""
        self._text, self._cache = text, cache
        self._map = np.array(token_map, dtype=np.int32)
        self._plain, self._scaled = frequencies
        device = self._plain.device
        self._device_map = torch.tensor(token_map, device=device)
        self._back, self._max_len = text.ngram_history, max_len
        self._ratios = sorted({text.ratio(layer) for layer in text.kv_source_layer_ids})
        self._rows = StagedRows(max_rows, _GRAMS + self._back + 1, device)
        self._tables = DeviceTables(cache.num_state_slots, -(-max_len // cache.block_size), device)
        self._behind = torch.arange(1 - cache.window, 1, device=device)
        self._counting = torch.arange(max_rows, device=device)

    @staticmethod
    def fits(batch: Batch) -> bool:
        """Whether a batch has the form that is recorded: no prefill, and logits wanted of every row."""
        if batch.kind is StepKind.PREFILL:
            return False
        return all(s.logit_rows is LogitRows.ALL or (s.logit_rows is LogitRows.LAST and len(s.token_ids) == 1) for s in batch.slices)

    def load(self, batch: Batch, size: int) -> None:
        """Send a batch; rows behind it become padding up to `size`."""
        rows = np.array([row for s in batch.slices for row in self._rows_of(s)], dtype=np.int32).reshape(-1, self._rows.values.shape[1])
        self._rows.upload(rows, size)
        if batch.late is not None:
            part = self._rows.values[: len(rows)]
            fill_late(batch.late, part[:, _TOKEN], part[:, _GRAMS:], self._device_map)
        self._tables.update({s.state_slot: s.block_table for s in batch.slices})

    def _rows_of(self, s: SequenceSlice) -> list[list[int]]:
        back, known = self._back, len(s.history)
        assert len(s.block_table) * self._cache.block_size >= s.end, f"{len(s.block_table)} blocks cannot hold {s.end} tokens"
        assert known >= min(back, s.start), f"history has {known} ids, position {s.start} needs {min(back, s.start)}"
        ids = [*s.history[known - min(back, known) :], *s.token_ids]
        compressed = [DEAD] * (back - min(back, known)) + (self._map[ids].tolist() if back else [])
        rows = []
        for i, token in enumerate(s.token_ids):
            grams = compressed[i : i + back + 1][::-1] if back else [DEAD]
            rows.append([token, s.start + i, s.state_slot, s.swa_valid_start, int(i > 0), *grams])
        return rows

    def real_rows(self, size: int) -> Tensor:
        """[size] bool: which of the first rows are no padding. Computed on the device, as part of the step."""
        return self._rows.values[:size, _SLOT] != 0

    def step_inputs(self, size: int) -> StepInputs:
        """The inputs of the first `size` rows, computed on the device without a look at the host."""
        columns = self._rows.values[:size].t().long()
        position, slot, joined = columns[_POSITION], columns[_SLOT], columns[_JOINED].bool()
        counting = self._counting[:size]
        # One table per row, as if every row were a sequence of its own.
        tables = self._tables.values.index_select(0, slot).long()
        rows = self._window(size, position, slot, columns[_FLOOR])
        return StepInputs(
            token_ids=columns[_TOKEN],
            grams=columns[_GRAMS:].t(),
            block_table=tables,
            encoder=rows,
            decoder=rows,
            kept=None,
            entries={ratio: self._entries(ratio, position, slot, joined, tables) for ratio in self._ratios},
            max_visible={ratio: self._max_len // ratio for ratio in self._ratios},
            logit_rows=counting,
        )

    def _window(self, size: int, position: Tensor, slot: Tensor, floor: Tensor) -> Rows:
        ring = self._cache.ring_rows
        first = slot * ring
        keys = position[:, None] + self._behind
        index = (first[:, None] + keys % ring).masked_fill(keys < floor[:, None], -1)
        plain, scaled = rotation(position, self._plain), rotation(position, self._scaled)
        return Rows(
            positions=position,
            seq=self._counting[:size],
            bounds=[(row, row + 1) for row in range(size)],
            rotations=Rotations(plain, scaled, plain.conj_physical(), scaled.conj_physical()),
            history=None,
            window=Selection.of(index),
            store_rows=None,
            store_slots=first + position % ring,
            visible={ratio: (position + 1).div(ratio, rounding_mode="floor") for ratio in self._ratios},
        )

    def _entries(self, ratio: int, position: Tensor, slot: Tensor, joined: Tensor, tables: Tensor) -> NewEntries:
        """One entry per row. A row that completes none writes into the dummy block."""
        per_block = self._cache.block_size // ratio
        entry = position.div(ratio, rounding_mode="floor")
        block = tables.gather(1, entry.div(per_block, rounding_mode="floor")[:, None])[:, 0]
        block = block.masked_fill(position % ratio != ratio - 1, 0)
        rot = rotation(entry * ratio, self._scaled)
        common = (block, entry % per_block, rot)
        if ratio == 1:
            return NewEntries(*common)
        partial, counting = self._cache.partial_rows, self._counting[: len(position)]
        pairs = Pairs(
            load=slot * partial + (position - 1) % partial,
            # Rows of [partials of every row | this step's rows].
            first=torch.where(joined, len(position) + counting - 1, counting),
            last=counting,
            store_rows=counting,
            store_slots=slot * partial + position % partial,
        )
        return NewEntries(*common, pairs)
