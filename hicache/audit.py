"""Proof that stored bytes are the bytes that were stored: checksums, and faults to show that they work."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor

from hicache.host_pool import HostArena

SAMPLED_SHARE = 0.01  # pages verified per restore, besides those nearest the restore point and the state
ALWAYS_VERIFIED = 4  # last pages of every restore: the two candidate restore points of one prompt lie within them
EXPONENT_BYTE = 3  # most significant byte of a little-endian fp32: sign and high exponent bits
EXPONENT_BIT = 0x40  # turns a value of ordinary size into one beyond 1e18


class Audit(Protocol):
    """Remembers what was stored in each frame and tells, after a restore, which frame brought something else."""

    def store(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        """Rows of `device` [N, n] uint8 are on their way into `frames`. Taken from the source, so that a lost copy is noticed too."""

    def choose(self, num_pages: int) -> list[int] | None:
        """Indices of the pages to verify in a restore of `num_pages` pages; None: verify nothing, not even the state."""

    def first_bad(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> int | None:
        """Index of the first frame whose bytes, restored into `rows` of `device`, are not those that were stored."""

    def checksum(self, frame: int) -> int:
        """crc32 of a stored frame, 0 when it is not known."""

    def adopt(self, frame: int, checksum: int) -> None:
        """The frame was stored by a former process; 0: its checksum is not known, so it is not verified."""


class NoAudit:
    """Trusts every byte."""

    def store(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        return None

    def choose(self, num_pages: int) -> list[int] | None:
        return None

    def first_bad(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> int | None:
        return None

    def checksum(self, frame: int) -> int:
        return 0

    def adopt(self, frame: int, checksum: int) -> None:
        return None


class HostAudit:
    """crc32 by the CPU, for a device whose memory is host memory. `full` verifies every page of a restore, else the last pages, the
    state, and 1 % of the other pages.
    """

    def __init__(self, num_frames: int, *, full: bool) -> None:
        self._full, self._sums, self._random = full, array("I", [0]) * num_frames, Random(0)

    def store(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        for row, frame in zip(rows, frames, strict=True):
            self._sums[frame] = crc_of(device[row])

    def choose(self, num_pages: int) -> list[int] | None:
        last = 0 if self._full else max(0, num_pages - ALWAYS_VERIFIED)
        return [i for i in range(last) if self._random.random() < SAMPLED_SHARE] + list(range(last, num_pages))

    def first_bad(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> int | None:
        pairs = enumerate(zip(frames, rows, strict=True))
        sums = self._sums
        return next((i for i, (frame, row) in pairs if sums[frame] and crc_of(device[row]) != sums[frame]), None)

    def checksum(self, frame: int) -> int:
        return self._sums[frame]

    def adopt(self, frame: int, checksum: int) -> None:
        self._sums[frame] = checksum


class DeviceAudit:
    """A weighted sum by the device, which never sends bytes over the bus twice. Verifying waits for the device, so without `full` only
    1 % of the restores are verified, those completely.
    """

    def __init__(self, num_frames: int, row_bytes: int, device: torch.device, *, full: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        # Odd weights are invertible modulo 2**64: no change of a single word leaves the sum as it was.
        weights = torch.randint(-(2**62), 2**62, (row_bytes // 4,), generator=generator) * 2 + 1
        self._weights = weights.to(device)
        self._sums = torch.zeros(num_frames, dtype=torch.int64, device=device)
        self._unknown: set[int] = set()
        self._share, self._random = 1.0 if full else SAMPLED_SHARE, Random(0)

    def store(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        if frames:
            self._sums[self._index(frames)] = self._sum(device, rows)
            self._unknown.difference_update(frames)

    def choose(self, num_pages: int) -> list[int] | None:
        return list(range(num_pages)) if self._random.random() < self._share else None

    def first_bad(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> int | None:
        if not frames:
            return None
        bad = (self._sum(device, rows) != self._sums[self._index(frames)]).nonzero()[:, 0].tolist()
        return next((int(i) for i in bad if frames[i] not in self._unknown), None)

    def checksum(self, frame: int) -> int:
        return 0  # its sums are not crc32

    def adopt(self, frame: int, checksum: int) -> None:
        self._unknown.add(frame)

    def _sum(self, device: Tensor, rows: Sequence[int]) -> Tensor:
        words = device.index_select(0, self._index(rows)).view(torch.int32)
        return (words.to(torch.int64) * self._weights[: words.shape[1]]).sum(1)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._sums.device)


def open_audit(mode: str, num_frames: int, frame_bytes: int, device: torch.device) -> Audit:
    """The audit for `mode` off, sampled or full."""
    if mode == "off":
        return NoAudit()
    if device.type == "cpu":
        return HostAudit(num_frames, full=mode == "full")
    return DeviceAudit(num_frames, frame_bytes, device, full=mode == "full")


def crc_of(row: Tensor) -> int:
    """crc32 of a row of bytes in host memory."""
    buffer: Any = row.numpy()  # an array is a buffer, which its type only says from Python 3.12 on
    return zlib.crc32(buffer)


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
