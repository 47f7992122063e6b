"""What one rank's arena holds, as another process sees it: read from the owner's records, never written.

A lookup here is exact up to the owner's last change: the table is the owner's own, not a model of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache.index import NONE
from hicache.records import Kind, Records
from hicache.segment import Segment


class PublishedIndex:
    """Pages and states of one segment by key."""

    def __init__(self, segment: Segment) -> None:
        self.segment, self.records = segment, Records(segment)
        self._pages: dict[bytes, int] = {}
        self._states: dict[bytes, int] = {}
        self._described: dict[int, tuple[Kind, bytes]] = {}
        self._seen = 0
        if self.records.head:  # nothing was ever written into a new segment
            self._scan()

    def __len__(self) -> int:
        return len(self._pages)

    def _scan(self) -> None:
        self._seen = self.records.head
        for table in (self._pages, self._states, self._described):
            table.clear()
        for frame in range(self.records.num_frames):
            self._look(frame)

    def refresh(self) -> None:
        """Follow what the owner changed since the last look."""
        head = self.records.head
        if head == self._seen:
            return
        changed = self.records.changes(self._seen)
        if changed is None:
            self._scan()
            return
        for frame in set(changed):
            self._look(frame)
        self._seen = head

    def _look(self, frame: int) -> None:
        known = self._described.pop(frame, None)
        if known is not None:
            table = self._pages if known[0] is Kind.PAGE else self._states
            if table.get(known[1]) == frame:
                del table[known[1]]
        record = self.records.read(frame)
        if record is None or record.kind is Kind.MORE:
            return
        self._described[frame] = record.kind, record.key
        (self._pages if record.kind is Kind.PAGE else self._states)[record.key] = frame

    def find(self, keys: Sequence[bytes], most_pages: int) -> tuple[int, list[int], int]:
        """(pages up to the deepest usable state, their frames, the state's first frame); (0, [], -1) when there is none."""
        frames: list[int] = []
        for key in keys[:most_pages]:
            frame = self._pages.get(key)
            if frame is None:
                break
            frames.append(frame)
        for count in range(len(frames), 0, -1):
            state = self._states.get(keys[count - 1])
            if state is not None:
                return count, frames[:count], state
        return 0, [], NONE
