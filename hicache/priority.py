"""How long a stored prefix is kept compared with others: what requests ask for, and when a raised priority ends.

Priorities are a property of paths: a page ranks at least as high as the pages below it, so that whatever ranks lowest and was used
longest ago is always a leaf.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.index import PrefixIndex
from hicache.ranking import DEFAULT_PRIORITY

MOST_RAISED_SHARE = 0.5  # of all frames: pages above the default priority; the rest is left to traffic
INHERITED_S = 3600.0  # what a killed rank left above the default keeps its priority that long, since the end of it is not known
_MOST_LEASES, _MOST_FRAMES = 4096, 2**20  # ends that are remembered, and frames of their paths; for more, the soonest end now
_MOST_AT_ONCE = 4096  # frames of ended paths that a step looks at, so that many ends at one moment stop no stream


@dataclass(frozen=True, slots=True)
class Use:
    """What one sequence did with a path, which decides how long it stays.

    priority: 0 (goes first) to 100. seconds: after which one above the default ends, infinity for never. num_hit: leading pages of
    the path that were there when it came, another visit to them. num_new: pages at its end that were not known before it.
    """

    priority: int = DEFAULT_PRIORITY
    seconds: float = math.inf
    num_hit: int = 0
    num_new: int = 0


UNUSED = Use(0)  # a path that was looked at and left as it was


class RaisedPaths:
    """Pages above the default priority, and when they lose it. Where several requests asked, the latest end counts."""

    def __init__(self, index: PrefixIndex, clock: Callable[[], float]) -> None:
        self._index, self._clock = index, clock
        self._until = array("d")  # of a raised page; made when the first one is
        self._ends: list[tuple[float, array[int]]] = []  # heap of (end, path). Ends differ, so that a page knows its lease by it
        self._num_frames = 0  # of all their paths

    @property
    def num_bytes(self) -> int:
        """Bytes of the ends by frame; 0 until a page was raised."""
        return self._until.itemsize * len(self._until)

    def allows(self, path: Sequence[int]) -> bool:
        """Whether one more path may be raised: pages above the default must not fill the arena."""
        index = self._index
        return index.ranks.num_raised + sum(not index.is_raised(frame) for frame in path) <= MOST_RAISED_SHARE * index.num_frames

    def raise_for(self, path: Sequence[int], seconds: float) -> None:
        """Pages of a path are about to rank above the default for `seconds`."""
        if not self._until:
            self._until = array("d", [0.0]) * self._index.num_frames
        until, index, end = self._until, self._index, self._unused_end(self._clock() + seconds)
        if end < math.inf:
            self._make_room(len(path))
            heapq.heappush(self._ends, (end, array("i", path)))
            self._num_frames += len(path)
        for frame in path:
            until[frame] = max(until[frame], end) if index.is_raised(frame) else end

    def _make_room(self, num_frames: int) -> None:
        """For one more end, by ending others: the new path has not its rank yet, so it could not lose it."""
        while self._ends and (len(self._ends) >= _MOST_LEASES or self._num_frames + num_frames > _MOST_FRAMES):
            self._lower(*heapq.heappop(self._ends))

    def _unused_end(self, end: float) -> float:
        taken = {other for other, _ in self._ends} if end < math.inf else ()
        while end in taken:
            end = math.nextafter(end, math.inf)
        return end

    def expire(self) -> None:
        """Lower what has had its time, some paths a call. Called in every step; O(1) while nothing has."""
        looked_at = 0
        while self._ends and looked_at < _MOST_AT_ONCE and self._ends[0][0] <= self._clock():
            end, path = heapq.heappop(self._ends)
            self._lower(end, path)
            looked_at += len(path)

    def _lower(self, end: float, path: array[int]) -> None:
        """The deepest page first. A page whose end is a later one stays, and what lies below such a page ended before it."""
        self._num_frames -= len(path)
        for frame in reversed(path):
            if self._until[frame] == end and self._index.is_raised(frame):
                self._index.ranks.lower(frame)

    def clear(self) -> None:
        """The cache was reset."""
        self._ends.clear()
        self._num_frames = 0
