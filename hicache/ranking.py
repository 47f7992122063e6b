"""The eviction rank of a page, from its priority and whether it was hit."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from hicache.recency import NONE, RecencyLists

MOST_PRIORITY, DEFAULT_PRIORITY = 100, 35
NUM_RANKS = 2 * (MOST_PRIORITY + 1)  # of a page: twice its priority, and one more when it is protected
PROTECTED_SHARE = 0.8  # of all frames: most protected pages. Source: the usual segmented LRU, with a fifth on probation
Ranks = bytearray | memoryview


class PageRanks:
    """The rank of every page, and how many pages have it. List n of `lists` holds the unpinned pages of rank n.

    of: rank by frame; one byte each, in memory that may outlive this process. ref: pins by frame. segmented: pages that were hit are
    protected: they leave after all others of their priority, up to `PROTECTED_SHARE` of the frames. on_priority: hears of a page whose
    priority has changed.
    """

    def __init__(
        self, of: Ranks, ref: array[int], lists: RecencyLists, on_priority: Callable[[int], None], *, segmented: bool = False
    ) -> None:
        self.of, self._ref, self._lists, self._on_priority = of, ref, lists, on_priority
        self.protects = int(segmented)
        self._most_protected = PROTECTED_SHARE * len(of)
        self.num_pages = array("i", bytes(4 * NUM_RANKS))
        self.num_raised = 0  # pages above the default priority
        self.num_protected = 0

    def priority(self, page: int) -> int:
        """The priority of a present page and of its state."""
        return self.of[page] >> 1

    def lowest(self) -> int:
        """The lowest rank of all unpinned pages, or -1."""
        return self._lists.lowest(0, NUM_RANKS)

    def lowest_priority(self) -> int:
        """The priority of the page that would leave next, or -1."""
        return self.lowest() >> 1

    def count(self, rank: int, pages: int) -> None:
        """So many pages more have that rank."""
        self.num_pages[rank] += pages
        self.num_protected += (rank & 1) * pages
        if rank >> 1 > DEFAULT_PRIORITY:
            self.num_raised += pages

    def lift(self, page: int, rank: int) -> int:
        """Let a pinned page rank at least at `rank`. Returns its rank."""
        if self.of[page] < rank:
            self._set(page, rank)
        return self.of[page]

    def lower(self, page: int) -> None:
        """The raised priority of a page is over; what lies below it was lowered before. It becomes a recent page of default priority,
        protected if there are such: pages below it may be."""
        self._move(page, 2 * DEFAULT_PRIORITY + self.protects)

    def end_protection(self) -> None:
        """The least recent protected pages that are too many go back on probation, those of the lowest priority first."""
        while self.num_protected > self._most_protected:
            rank = self._lists.lowest(1, NUM_RANKS, 2)
            if rank == NONE:
                return
            self._move(self._lists.oldest(rank), rank - 1)

    def adopt(self, page: int, parent: int) -> None:
        """List a page with the rank that a former owner left, deeper pages before. Protections end, and its parent ranks as high."""
        rank = self.of[page] = min(self.of[page] & ~1, NUM_RANKS - 2)
        if parent != NONE:
            self.of[parent] = max(self.of[parent] & ~1, rank)
        self.count(rank, 1)
        self._lists.push(rank, page)

    def forget(self, num_present: int) -> None:
        """All pages rank lowest, in the order in which they would leave. O(ranks), and one pass over bytes."""
        self._lists.empty_into(self._lists.used(0, NUM_RANKS), 0)
        self.of[:] = bytes(len(self.of))
        self.num_pages = array("i", bytes(4 * NUM_RANKS))
        self.num_pages[0] = num_present
        self.num_raised = self.num_protected = 0

    def _set(self, page: int, rank: int) -> None:
        before = self.of[page]
        self.count(before, -1)
        self.count(rank, 1)
        self.of[page] = rank
        if before >> 1 != rank >> 1:
            self._on_priority(page)

    def _move(self, page: int, rank: int) -> None:
        """Move a page to the recent end of another rank; a pinned one goes there with its last pin."""
        self._set(page, rank)
        if self._ref[page] == 0:
            self._lists.unlink(page)
            self._lists.push(rank, page)
