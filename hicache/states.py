"""Window states in the index: which page has one, its frames and reason, what is evicted first, and which pages lead to one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from heapq import merge

from hicache.recency import NONE, RecencyLists


class StateReason(IntEnum):
    """Why a window state was kept, the most lasting reason first: a state wanted twice keeps the lower number."""

    ANCHOR = 0  # end of system and tools text
    FORK = 1  # where a request left a known path
    ASKED = 2  # where a held follower leaves its leader
    INTERVAL = 3  # every so many tokens of a long prompt
    RESEND = 4  # where an identical prompt may resume
    TAIL = 5  # last page end of a prompt
    ABORT = 6  # last page end before an abort or a preemption
    DECODE = 7  # last page end of an answer


class StateTable:
    """States by page. A state's id is its first frame; it is listed by the priority of its page and leaves with it at the latest.

    of: page -> its state. reason: of a state. parent, position, ref: the index's arrays; a state's parent is its page. priority: of a page.
    Its lists are those from `first_list` on, one per priority.
    """

    def __init__(
        self,
        parent: array[int],
        position: array[int],
        ref: array[int],
        lists: RecencyLists,
        first_list: int,
        end_list: int,
        priority: Callable[[int], int],
    ) -> None:
        num_frames = len(parent)
        self._parent, self._position, self._ref, self._priority = parent, position, ref, priority
        self._lists, self._first_list, self._end_list = lists, first_list, end_list
        self.of = array("i", [NONE]) * num_frames
        self.reason = bytearray(num_frames)
        self._chain = array("i", [NONE]) * num_frames  # a state's frame -> its next frame
        self._leads_to = array("i", [0]) * num_frames  # page -> children through which states are reached, and its own state
        self._count = 0
        self.num_unreachable = 0  # pages without a state at or below them: nothing can be restored through them

    def __len__(self) -> int:
        return self._count

    @property
    def num_bytes(self) -> int:
        return sum(a.itemsize * len(a) for a in (self.of, self._chain, self._leads_to)) + len(self.reason)

    # -- lookup ------------------------------------------------------------------------------------------------------------

    def deepest(self, path: Sequence[int], num_pages: int) -> int:
        """The state at the deepest position among the first `num_pages` pages of `path`, or -1."""
        of = self.of
        for index in range(min(num_pages, len(path)) - 1, -1, -1):
            if of[path[index]] != NONE:
                return of[path[index]]
        return NONE

    def on(self, path: Sequence[int]) -> list[int]:
        """All states on `path`, shallowest first."""
        return [self.of[page] for page in path if self.of[page] != NONE]

    def frames(self, state: int) -> list[int]:
        """The frames of a state, in the order of its bytes."""
        frames = [state]
        while (following := self._chain[frames[-1]]) != NONE:
            frames.append(following)
        return frames

    def worth(self, state: int, limit_pages: int) -> int:
        """Tokens between a state and the next shallower one of its path; the walk stops after `limit_pages` pages."""
        page = self._parent[state]
        end = self._position[page]
        for _ in range(limit_pages):
            page = self._parent[page]
            if page == NONE:
                return end
            if self.of[page] != NONE:
                return end - self._position[page]
        return end - self._position[page]

    def newest(self, reason: StateReason) -> int:
        """The most recent listed state of that reason, else the most recent of any, else -1."""
        newest = next(self.by_recency(), NONE)
        return next((state for state in self.by_recency() if self.reason[state] == reason), newest)

    def by_recency(self) -> Iterator[int]:
        """Listed states, most recent first."""
        stamp, numbers = self._lists.stamp, self._lists.used(self._first_list, self._end_list)
        return merge(*(self._lists.newest_first(number) for number in numbers), key=lambda state: -stamp[state])

    def oldest(self) -> int:
        """The least recent listed state of the lowest priority, or -1."""
        number = self._lists.lowest(self._first_list, self._end_list)
        return NONE if number == NONE else self._lists.oldest(number)

    # -- use ---------------------------------------------------------------------------------------------------------------

    def pin(self, state: int) -> None:
        """Keep a state from being evicted alone; its path must be pinned too."""
        self._ref[state] += 1
        self._lists.unlink(state)

    def unpin(self, state: int) -> None:
        self._ref[state] -= 1
        assert self._ref[state] >= 0, f"state {state} is unpinned twice"
        if self._ref[state] == 0:
            self.touch(state)

    def touch(self, state: int) -> None:
        """Make an unpinned state the most recent one of its page's priority."""
        if self._ref[state]:
            return
        self._lists.stamp[state] = self._lists.tick()
        self._lists.unlink(state)
        self._lists.push(self._first_list + self._priority(self._parent[state]), state)

    def unlist(self, state: int) -> None:
        """Take a state that is worth its memory out of the list until it is touched again; it then leaves with its page only."""
        self._lists.unlink(state)

    def follow(self, page: int) -> None:
        """The priority of `page` has changed: its state, if listed, is listed by the new one."""
        state = self.of[page]
        if state != NONE and self._lists.holds(state):
            self._lists.unlink(state)
            self._lists.push(self._first_list + self._priority(page), state)

    def forget_priorities(self) -> None:
        """All states are listed as those of the lowest priority. O(lists)."""
        self._lists.empty_into(self._lists.used(self._first_list, self._end_list), self._first_list)

    # -- change ------------------------------------------------------------------------------------------------------------

    def add(self, page: int, frames: Sequence[int], reason: StateReason) -> int:
        """Attach a state that fills `frames` to a page without one. Returns the state's id."""
        assert self.of[page] == NONE, f"page frame {page} has a state already"
        for frame, following in zip(frames, [*frames[1:], NONE], strict=True):
            self._chain[frame] = following
        state = frames[0]
        self.of[page], self._parent[state], self._position[state] = state, page, self._position[page]
        self._ref[state], self.reason[state] = 0, reason
        self._lists.clear(state)
        self._count += 1
        self._open(page)
        self.touch(state)
        return state

    def remove(self, state: int) -> list[int]:
        """Remove a state alone. Returns the frames to free."""
        assert self._ref[state] == 0, f"state {state} is pinned"
        page = self._parent[state]
        self._lists.unlink(state)
        self.of[page] = NONE
        self._count -= 1
        self._shut(page)
        return self.frames(state)

    def pages_added(self, pages: Sequence[int]) -> None:
        """Pages without states were inserted."""
        leads_to = self._leads_to
        for page in pages:
            leads_to[page] = 0
        self.num_unreachable += len(pages)

    def pages_removed(self, count: int) -> None:
        """Leaves whose states are removed already were."""
        self.num_unreachable -= count

    def _open(self, page: int) -> None:
        """Pages up to the next one that leads to a state already lead to the new one at `page`."""
        leads_to = self._leads_to
        while page != NONE:
            leads_to[page] += 1
            if leads_to[page] > 1:
                return
            self.num_unreachable -= 1
            page = self._parent[page]

    def _shut(self, page: int) -> None:
        leads_to = self._leads_to
        while page != NONE:
            leads_to[page] -= 1
            if leads_to[page]:
                return
            self.num_unreachable += 1
            page = self._parent[page]
