"""Proof that stored bytes are the bytes that were stored: checksums, and faults to show that they work."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from torch import Tensor

from hicache.host_pool import HostArena

SAMPLED_SHARE = 0.01  # pages verified per restore, besides those nearest the restore point and the state
ALWAYS_VERIFIED = 4  # last pages of every restore: the two candidate restore points of one prompt lie within them
EXPONENT_BYTE = 3  # most significant byte of a little-endian fp32: sign and high exponent bits
EXPONENT_BIT = 0x40  # turns a value of ordinary size into one beyond 1e18


class Checksums:
    """crc32 of pages and states: taken at the store, compared at a restore.

    mode: off, sampled (the last pages, the state, and 1 % of the other pages) or full. Reads host memory, so on an accelerator the
    copies that wrote it must have completed.
    """

    def __init__(self, mode: str, arena: HostArena, row_bytes: int) -> None:
        assert mode in ("off", "sampled", "full"), f"audit mode is {mode!r}"
        self.mode = mode
        self._memory, self._stride, self._row_bytes = arena.memory, arena.frame_bytes, row_bytes
        self._random = Random(0)

    @property
    def enabled(self) -> bool:
        return self.mode != "off"

    def of(self, row: Tensor) -> int:
        """Checksum of bytes on their way into the arena: row [n] uint8 in host memory. Taken from the source, so that a copy that
        was lost or cut short is noticed too."""
        buffer: Any = row.numpy()  # an array is a buffer, which its type only says from Python 3.12 on
        return zlib.crc32(buffer)

    def page(self, frame: int) -> int:
        """Checksum of one page."""
        start = frame * self._stride
        return zlib.crc32(self._memory[start : start + self._row_bytes])

    def state(self, frames: Sequence[int], num_bytes: int) -> int:
        """Checksum of the `num_bytes` bytes of a state that lie in `frames`."""
        crc = 0
        for index, frame in enumerate(frames):
            start = frame * self._stride
            length = min(self._stride, num_bytes - index * self._stride)
            crc = zlib.crc32(self._memory[start : start + length], crc)
        return crc

    def choose(self, num_pages: int) -> list[int]:
        """Indices of the pages to verify when the first `num_pages` pages of a path are restored."""
        if self.mode == "full":
            return list(range(num_pages))
        if self.mode == "off" or num_pages == 0:
            return []
        draw = self._random.random
        last = max(0, num_pages - ALWAYS_VERIFIED)
        return [i for i in range(last) if draw() < SAMPLED_SHARE] + list(range(last, num_pages))


@dataclass(frozen=True, slots=True)
class Flip:
    """A byte changed on purpose."""

    frame: int
    offset: int
    before: int
    after: int


def flip_bytes(arena: HostArena, frame: int, offsets: Sequence[int], mask: int = EXPONENT_BIT) -> list[Flip]:
    """XOR bytes of a frame with `mask`. Returns what changed."""
    flips = []
    for offset in offsets:
        at = frame * arena.frame_bytes + offset
        before = arena.memory[at]
        arena.memory[at] = before ^ mask
        flips.append(Flip(frame, offset, before, before ^ mask))
    return flips
