"""Accounting of device cache blocks and state slots: two reference-counted pools and the admission of sequences."""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from engine.request import Sequence


class Admit(StrEnum):
    """Can a sequence get its blocks: now, later when others finish, or never on this pool?"""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class RefPool:
    """Ids first .. first+size-2, handed out first-in first-out. Id 0 is the dummy that padding rows point to; it is never handed out.

    FIFO reuses the id that has been free the longest, so that a stale reader of freed memory is caught late rather than never.
    Every id has a reference count: `allocate` sets it to 1, `pin` adds one, `free` drops one and returns the id at zero.
    size counts the dummy. first: above 1 when other ranks hand out the ids before it.
    """

    __slots__ = ("_first", "_free", "_refs", "name", "size")

    def __init__(self, size: int, name: str, first: int = 1) -> None:
        assert size >= 2, f"pool of {name} has {size} entries, needs the dummy and at least one more"
        self.name = name
        self.size = size
        self._first = first
        self._free: deque[int] = deque(range(first, first + size - 1))
        self._refs = [0] * (first + size - 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.size - 1 - len(self._free)

    @property
    def usage(self) -> float:
        """Share in use, the dummy counted as used. Source: the release's watermark counts its reserved block 0."""
        return (self.size - len(self._free)) / self.size

    def refs(self, item: int) -> int:
        return self._refs[item]

    def admit(self, count: int) -> Admit:
        if count >= self.size:
            return Admit.NEVER
        return Admit.OK if count <= len(self._free) else Admit.LATER

    def allocate(self, count: int = 1) -> list[int]:
        """`count` ids with one reference each. The caller has asked `admit` before."""
        assert count <= len(self._free), f"{count} {self.name} asked, {len(self._free)} free"
        taken = [self._free.popleft() for _ in range(count)]
        for item in taken:
            self._refs[item] = 1
        return taken

    def pin(self, item: int) -> None:
        """One more owner of an id that somebody owns already."""
        self._check_owned(item, "pin")
        self._refs[item] += 1

    def free(self, item: int) -> None:
        """One owner less; the last one returns the id to the tail of the free list."""
        self._check_owned(item, "free")
        self._refs[item] -= 1
        if self._refs[item] == 0:
            self._free.append(item)

    def _check_owned(self, item: int, action: str) -> None:
        first, last = self._first, self._first + self.size - 2
        assert first <= item <= last, f"{action} of {self.name} {item}, ids are {first} to {last}"
        assert self._refs[item] > 0, f"{action} of {self.name} {item}, which nobody owns"

    def free_all(self, items: list[int]) -> None:
        """Free a table last entry first, so that the head of a prefix stays untouched the longest."""
        for item in reversed(items):
            self.free(item)


class BlockManager:
    """Gives sequences their blocks and state slot, all or nothing, and takes them back."""

    def __init__(self, num_blocks: int, num_state_slots: int, block_size: int, part: int = 0) -> None:
        """part: which of several equal ranges of ids is this rank's, see `engine/parallel/prompt_exchange.py`."""
        self.block_size = block_size
        self.blocks = RefPool(num_blocks, "blocks", 1 + part * (num_blocks - 1))
        self.slots = RefPool(num_state_slots, "state slots", 1 + part * (num_state_slots - 1))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, num_tokens: int) -> Admit:
        """Whether `num_tokens` tokens and one state slot can be had: the whole prompt counts, not its first chunk."""
        blocks = self.blocks.admit(self.blocks_for(num_tokens))
        if blocks is not Admit.OK:
            return blocks
        return self.slots.admit(1)

    def allocate(self, seq: Sequence, num_tokens: int) -> None:
        """Blocks for `num_tokens` tokens and a state slot, after `admit` said OK."""
        assert not seq.block_table, f"sequence {seq.seq_id} owns blocks {seq.block_table}"
        assert seq.state_slot == -1, f"sequence {seq.seq_id} owns state slot {seq.state_slot}"
        seq.state_slot = self.slots.allocate(1)[0]
        seq.block_table = self.blocks.allocate(self.blocks_for(num_tokens))

    def release(self, seq: Sequence) -> None:
        """Give everything back and reset the ids. Harmless on a sequence that owns nothing."""
        self.blocks.free_all(seq.block_table)
        seq.block_table = []
        if seq.state_slot != -1:
            self.slots.free(seq.state_slot)
            seq.state_slot = -1

    @property
    def tokens_total(self) -> int:
        return (self.blocks.size - 1) * self.block_size

    @property
    def tokens_used(self) -> int:
        return self.blocks.num_used * self.block_size
