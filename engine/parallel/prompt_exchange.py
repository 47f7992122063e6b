"""The prompts of several ranks as one batch, the same on all of them, and what their caches must agree on before it runs.

Block and slot numbers need no translation: every rank hands out numbers of a range of its own (`engine/block_manager.py`), so a guest's
cache has the same rows free for the same sequence. Only the owner decodes; a guest's copy serves the further chunks of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.kv_cache import KVCache
from engine.parallel.tensor_group import TensorGroup

_ROWS = (LogitRows.NONE, LogitRows.LAST, LogitRows.ALL)


class PromptExchange:
    """One rank's end. All ranks of the group call the same methods in the same steps, also without prompts of their own."""

    def __init__(self, group: TensorGroup, kv: KVCache) -> None:
        self.group, self._kv = group, kv

    def join(self, batch: Batch) -> tuple[Batch, list[range]]:
        """The slices of all ranks in rank order, and which of them belong to each rank."""
        slices: list[SequenceSlice] = []
        owners = []
        for numbers in self.group.gather_ints(pack(batch.slices)):
            theirs = unpack(numbers)
            owners.append(range(len(slices), len(slices) + len(theirs)))
            slices += theirs
        return Batch(StepKind.PREFILL, slices), owners

    def copy_restored(self, batch: Batch, owners: list[range]) -> None:
        """Give every rank the blocks and windows that an owner has just taken from its prefix cache. A replay has blocks only."""
        for rank, numbers in enumerate(owners):
            for number in numbers:
                if batch.slices[number].restored:
                    self._copy(batch.slices[number], rank)

    def _copy(self, piece: SequenceSlice, owner: int) -> None:
        kv = self._kv
        replays = piece.start == piece.swa_valid_start
        assert replays or piece.restored == piece.start, f"restored {piece.restored} tokens, the chunk begins at {piece.start}"
        table = torch.tensor(piece.block_table[: piece.restored // kv.block_size], device=kv.blocks.device)
        mine = owner == self.group.rank
        pages = kv.blocks.index_select(0, table) if mine else kv.blocks.new_empty(len(table), kv.blocks.shape[1])
        self.group.broadcast(pages, owner)
        if not mine:
            kv.blocks.index_copy_(0, table, pages)
        if replays:
            return
        window = torch.empty(kv.state_bytes, dtype=torch.uint8, device=kv.blocks.device)
        if mine:
            kv.save_window(piece.state_slot, piece.restored, window)
        self.group.broadcast(window, owner)
        if not mine:
            kv.load_window(piece.state_slot, piece.restored, window)


def pack(slices: list[SequenceSlice]) -> list[int]:
    """Slices as integers, none negative."""
    numbers = [len(slices)]
    for s in slices:
        lists = (s.token_ids, s.block_table, s.history)
        numbers += (s.start, s.total_len, s.state_slot, s.swa_valid_start, _ROWS.index(s.logit_rows), s.restored, s.entries_start)
        numbers += map(len, lists)
        for values in lists:
            numbers += values
    return numbers


def unpack(numbers: list[int]) -> list[SequenceSlice]:
    """The inverse of `pack`."""
    stream = iter(numbers)
    return [_take(stream) for _ in range(next(stream))]


def _take(stream: Iterator[int]) -> SequenceSlice:
    start, total_len, slot, valid, rows, restored, fresh, num_tokens, num_blocks, num_history = (next(stream) for _ in range(10))
    token_ids, table, history = ([next(stream) for _ in range(count)] for count in (num_tokens, num_blocks, num_history))
    return SequenceSlice(token_ids, start, total_len, table, slot, tuple(history), valid, _ROWS[rows], restored, fresh)
