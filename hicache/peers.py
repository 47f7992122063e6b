"""Pages that other ranks of this host have stored: found in their records, read under a lease, never written.

A reader counts its lease, then looks whether the record still stands; the owner takes its record away, then looks for leases. With a
full memory barrier between the two steps on both sides, one of them sees the other, so no frame is rewritten while it is read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hicache.host_pool import HostArena
from hicache.index import NONE
from hicache.published import PublishedIndex
from hicache.records import Record
from hicache.segment import CacheHome, Layout, Segment, SegmentRefused, open_peer, process_start
from hicache.transfer import Transfer

_LOOK_AGAIN_S = 1.0  # between two attempts to open a peer's segment, and two looks whether it is still the same file
_MOST_LEASES = 255
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PeerMatch:
    """What a peer holds of a prompt. pages and state are its frames; records and generations as they were when the lease was taken."""

    peer: Peer
    tokens: int
    pages: list[int]
    state: list[int]
    records: list[Record] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)

    @property
    def frames(self) -> list[int]:
        return [*self.pages, *self.state]


class Peer(PublishedIndex):
    """One peer's segment as a reader sees it, and what it takes to copy from there."""

    def __init__(self, segment: Segment, own_rank: int) -> None:
        super().__init__(segment)
        layout = segment.layout
        self.arena = HostArena(layout.num_frames, layout.frame_bytes, segment)
        self.transfer: Transfer | None = None  # made by the first restore
        self._row = LeaseRow(segment, own_rank)

    def lease(self, tokens: int, pages: list[int], state: int, keys: Sequence[bytes]) -> PeerMatch | None:
        """Keep the frames as they are until `release`. None when they have changed or are leased too often."""
        frames = self._chain(state)
        if not frames:
            return None
        match = PeerMatch(self, tokens, pages, frames)
        if not self._row.add(match.frames):
            return None
        expected = [*zip(pages, keys, strict=True), *((frame, keys[-1]) for frame in frames)]
        for frame, key in expected:
            record = self.records.read(frame)
            if record is None or record.key != key:
                self.release(match)
                return None
            match.records.append(record)
            match.generations.append(self.records.generation(frame))
        return match

    def _chain(self, state: int) -> list[int]:
        frames, most = [state], self.segment.layout.frames_per_state
        while (record := self.records.read(frames[-1])) is not None:
            if record.following == NONE:
                return frames if len(frames) == most else []
            if len(frames) == most or not 0 <= record.following < self.records.num_frames:
                return []
            frames.append(record.following)
        return []

    def unchanged(self, match: PeerMatch) -> bool:
        """Whether every record still stands as it was when the lease was taken."""
        return all(self.records.generation(frame) == was for frame, was in zip(match.frames, match.generations, strict=True))

    def release(self, match: PeerMatch) -> None:
        self._row.remove(match.frames)


class LeaseRow:
    """One reader's leases in one owner's segment: a count per frame, and who the reader is. Only the reader writes it."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self._memory, self._barrier = segment.mapping, threading.Lock()
        self._at = segment.layout.lease_row_at(rank)
        self._frames_at = self._at + 16
        self._memory[self._at : self._frames_at + segment.layout.num_frames] = bytes(16 + segment.layout.num_frames)
        self._memory[self._at : self._at + 16] = os.getpid().to_bytes(8, "little") + process_start(os.getpid()).to_bytes(8, "little")

    def add(self, frames: Sequence[int]) -> bool:
        memory, at = self._memory, self._frames_at
        if any(memory[at + frame] == _MOST_LEASES for frame in frames):
            return False
        for frame in frames:
            memory[at + frame] += 1
        with self._barrier:
            pass  # the lock's atomic instruction orders the counts before the reads that follow
        return True

    def remove(self, frames: Sequence[int]) -> None:
        memory, at = self._memory, self._frames_at
        for frame in frames:
            memory[at + frame] -= 1


class OwnLeases:
    """What peers read in this rank's own segment."""

    def __init__(self, segment: Segment, own_rank: int) -> None:
        layout = segment.layout
        self._memory, self._barrier = segment.mapping, threading.Lock()
        self._rows = [layout.lease_row_at(rank) for rank in range(layout.ranks) if rank != own_rank]

    def leased(self, frames: Sequence[int]) -> set[int]:
        """Those of `frames`, whose records are already cleared, that a living peer still reads."""
        with self._barrier:
            pass  # the cleared records are visible before the counts are read
        found: set[int] = set()
        for row in self._rows:
            held = [frame for frame in frames if self._memory[row + 16 + frame]]
            if held and self._alive(row):
                found.update(held)
        return found

    def _alive(self, row: int) -> bool:
        pid = int.from_bytes(self._memory[row : row + 8], "little")
        start = int.from_bytes(self._memory[row + 8 : row + 16], "little")
        return start > 0 and process_start(pid) == start


class Peers:
    """All other ranks of this server on this host. Opens their segments when they appear."""

    def __init__(self, home: CacheHome, layout: Layout, clock: Callable[[], float] = time.monotonic) -> None:
        self._home, self._layout, self._clock = home, layout, clock
        self._peers: dict[int, Peer] = {}
        self._inodes: dict[int, int] = {}
        self._look_at_s = 0.0

    def find(self, keys: Sequence[bytes], most_pages: int, least_tokens: int) -> PeerMatch | None:
        """A lease on the longest prefix of at least `least_tokens` that a peer can restore, or None."""
        size, best = self._layout.page_tokens, None
        for peer in self._open():
            peer.refresh()
            found = peer.find(keys, most_pages)
            if found[0] * size >= least_tokens and (best is None or found[0] > best[1][0]):
                best = peer, found
        if best is None:
            return None
        peer, (count, pages, state) = best
        return peer.lease(count * size, pages, state, keys[:count])

    def _open(self) -> Iterator[Peer]:
        if self._clock() >= self._look_at_s:
            self._look_at_s = self._clock() + _LOOK_AGAIN_S
            for rank in range(self._home.ranks):
                if rank != self._home.rank:
                    self._look(rank)
        yield from self._peers.values()

    def _look(self, rank: int) -> None:
        path = self._home.path(rank)
        try:
            inode = path.stat(follow_symlinks=False).st_ino
            if self._inodes.get(rank) == inode:
                return
            self._peers.pop(rank, None)
            self._peers[rank] = Peer(open_peer(path, self._layout), self._home.rank)
            self._inodes[rank] = inode
        except FileNotFoundError:
            return
        except (SegmentRefused, OSError) as error:
            log.debug("rank %d's cache cannot be read: %s", rank, error)
