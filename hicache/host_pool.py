"""The host arena: one mapping cut into equal frames, and the stack of free ones.

A page takes one frame, a window state any few; so no split between them has to be guessed, and the arena never fragments.
"""

from __future__ import annotations

import logging
import mmap
from array import array
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from hicache.errors import MachineError
from hicache.segment import Segment

FRAME_ALIGNMENT = 4096  # O_DIRECT and page granularity
POISON = 0xA5
MIN_HALVED_BYTES = 2**30
log = logging.getLogger(__name__)


def frame_bytes_for(row_bytes: int) -> int:
    """Bytes of a frame that carries one device block of `row_bytes`."""
    return -(-row_bytes // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


class HostArena:
    """One mapping as `rows`: [num_frames, frame_bytes] uint8; anonymous, or the data part of a segment. Memory is touched on first use,
    so RSS follows the load.

    Raises:
        MachineError: the mapping is refused.
    """

    def __init__(self, num_frames: int, frame_bytes: int, segment: Segment | None = None) -> None:
        assert num_frames > 0, f"{num_frames=}"
        assert frame_bytes % FRAME_ALIGNMENT == 0, f"{frame_bytes=}"
        self.num_frames, self.frame_bytes, self._segment = num_frames, frame_bytes, segment
        self._begin = segment.layout.data_at if segment is not None else 0
        try:
            # Private and not shared: the kernel gives huge pages to such memory when asked.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self.mapping = segment.mapping if segment is not None else mmap.mmap(-1, num_frames * frame_bytes, flags=flags)
        except (OSError, ValueError) as error:
            raise MachineError(
                f"cannot map {num_frames * frame_bytes / 2**30:.2f} GiB for the host cache: {error}", hint="lower --hicache-size-gb"
            ) from error
        if hasattr(mmap, "MADV_DONTFORK"):
            self.mapping.madvise(mmap.MADV_DONTFORK)
        data = torch.frombuffer(self.mapping, dtype=torch.uint8, offset=self._begin, count=num_frames * frame_bytes)
        self.rows: Tensor = data.view(num_frames, frame_bytes)

    @property
    def inherited(self) -> bool:
        """Whether a former owner's bytes are in it."""
        return self._segment is not None and self._segment.reused

    def reserve(self, frames: Sequence[int]) -> None:
        """Frames are about to be written. Raises MachineError when a segment's file system has no memory for them."""
        if self._segment is not None and frames:
            self._segment.reserve(max(frames))

    @property
    def num_bytes(self) -> int:
        return self.num_frames * self.frame_bytes

    @property
    def memory(self) -> memoryview:
        """The arena's bytes, without copying."""
        return memoryview(self.mapping)[self._begin :]

    def poison(self, frames: Sequence[int]) -> None:
        """Fill frames with a pattern that no cache row contains, so that a read of a freed frame shows."""
        self.rows[torch.tensor(list(frames), dtype=torch.int64)] = POISON


def map_arena(num_frames: int, frame_bytes: int, least_bytes: int = MIN_HALVED_BYTES) -> HostArena:
    """A private arena of up to `num_frames`: half of it, and half again, when the system refuses, down to `least_bytes`.

    Raises:
        MachineError: not even that can be mapped, or what was asked for is smaller and refused.
    """
    while True:
        try:
            return HostArena(num_frames, frame_bytes)
        except MachineError as error:
            num_frames //= 2
            if num_frames * frame_bytes < least_bytes:
                raise
            log.warning("%s; trying %.1f GiB", error, num_frames * frame_bytes / 2**30)


Leased = Callable[[Sequence[int]], Collection[int]]  # those of the given frames that peers are reading


class Owner(IntEnum):
    """Who holds a frame. RESERVED frames are being written and invisible to every lookup."""

    FREE = 0
    RESERVED = 1
    PAGE = 2
    STATE = 3
    LEASED = 4  # given back, but a peer or the disk is still reading it
    ABSENT = 5  # not page-locked yet


class FramePool:
    """Which frames are free, and what the others hold. A stack, so that recently used memory is used again first.

    Every frame has exactly one owner. Raises AssertionError on double allocation and double free.
    """

    def __init__(self, num_frames: int, on_free: Callable[[Sequence[int]], None] | None = None, num_usable: int | None = None) -> None:
        """on_free: hears of frames before they are free. num_usable: frames that are there from the beginning; others are `added`."""
        usable = num_frames if num_usable is None else num_usable
        assert 0 < usable <= num_frames, f"{usable} of {num_frames} frames are usable"
        self.num_frames = num_frames
        self._on_free = on_free
        self._free = array("i", range(usable - 1, -1, -1))
        self._owner = bytearray(usable) + bytes([Owner.ABSENT]) * (num_frames - usable)
        self._held = [0, 0, 0, 0, 0, num_frames - usable]  # frames per owner, FREE unused
        self._leased: list[Leased] = []
        self._waiting: list[int] = []  # LEASED frames

    @property
    def metadata_bytes(self) -> int:
        """Bytes of the stack and of the owners, all frames free."""
        return self._free.itemsize * self.num_frames + len(self._owner)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, owner: Owner) -> int:
        """Frames held by `owner`."""
        return len(self._free) if owner is Owner.FREE else self._held[owner]

    def owner(self, frame: int) -> Owner:
        return Owner(self._owner[frame])

    def add(self, frames: range) -> None:
        """ABSENT frames became usable. They are used after those that are free already."""
        for frame in frames:
            assert self._owner[frame] == Owner.ABSENT, f"frame {frame} is {self.owner(frame).name}, not absent"
            self._owner[frame] = Owner.FREE
        self._free = array("i", reversed(frames)) + self._free
        self._held[Owner.ABSENT] -= len(frames)

    def take(self, count: int) -> list[int]:
        """`count` free frames, now RESERVED. The caller made sure that there are enough."""
        assert 0 <= count <= len(self._free), f"took {count} of {len(self._free)} free frames"
        start = len(self._free) - count
        frames = self._free[start:].tolist()
        del self._free[start:]
        owners, free, reserved = self._owner, int(Owner.FREE), int(Owner.RESERVED)  # looking the names up costs as much as the rest
        for frame in frames:
            assert owners[frame] == free, f"frame {frame} is allocated twice"
            owners[frame] = reserved
        self._held[reserved] += count
        return frames

    def assign(self, frames: Sequence[int], owner: Owner) -> None:
        """RESERVED frames become part of a page or a state."""
        owners, reserved, new = self._owner, int(Owner.RESERVED), int(owner)
        for frame in frames:
            assert owners[frame] == reserved, f"frame {frame} is {Owner(owners[frame]).name}, not RESERVED"
            owners[frame] = new
        self._held[Owner.RESERVED] -= len(frames)
        self._held[owner] += len(frames)

    def hold(self, frames: Sequence[int], owner: Owner) -> None:
        """Free frames that already carry a page or a state: a former owner's."""
        taken = set(frames)
        assert len(taken) == len(frames), "a frame is held twice"
        for frame in frames:
            assert self._owner[frame] == Owner.FREE, f"frame {frame} is {self.owner(frame).name}, not free"
            self._owner[frame] = owner
        self._free = array("i", [frame for frame in self._free if frame not in taken])
        self._held[owner] += len(frames)

    def free(self, frames: Sequence[int]) -> None:
        """Give frames back, whatever they held."""
        if self._on_free is not None:
            self._on_free(frames)
        kept = self._still_read(frames)
        owners, held, free = self._owner, self._held, int(Owner.FREE)
        before = bytes(map(owners.__getitem__, frames))
        for frame in frames:
            owners[frame] = free
        released = 0
        for owner in (Owner.RESERVED, Owner.PAGE, Owner.STATE):
            held[owner] -= (count := before.count(owner))
            released += count
        assert released == len(set(frames)) == len(frames), f"of {len(frames)} frames given back {released} were held: one is freed twice"
        if not kept:
            self._free.extend(frames)
            return
        self._free.extend(frame for frame in frames if frame not in kept)
        for frame in kept:
            owners[frame] = Owner.LEASED
        held[Owner.LEASED] += len(kept)
        self._waiting.extend(kept)

    def watch_leases(self, leased: Leased) -> None:
        """From now on frames that somebody else reads are not used again before that has finished."""
        self._leased.append(leased)

    def _still_read(self, frames: Sequence[int]) -> set[int]:
        return {frame for leased in self._leased for frame in leased(frames)} if self._leased and frames else set()

    def collect_leased(self) -> None:
        """Take back the frames whose readers have finished."""
        if not self._waiting:
            return
        still = self._still_read(self._waiting)
        for frame in self._waiting:
            if frame not in still:
                self._owner[frame] = Owner.FREE
                self._held[Owner.LEASED] -= 1
                self._free.append(frame)
        self._waiting = [frame for frame in self._waiting if frame in still]
