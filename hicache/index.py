"""Which prefixes are stored: a map of page keys, prefix-closed, with recency lists and pins.

An entry's id is its frame (a state's is its first frame), so every attribute is one int array indexed by frame and there is no
Python object per page: a collector pass over 600,000 entries would otherwise stop every open stream for 0.2 s.

Paths are touched deepest page first, and a page ranks at least as high as those below it. So in the list of the lowest rank the least
recent unpinned page is always a leaf, and eviction is a pop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from heapq import merge

from hicache.page_map import NONE as NONE
from hicache.page_map import DictPageMap, PageMap
from hicache.page_tokens import PageTokens
from hicache.recency import RecencyLists

MOST_PRIORITY, DEFAULT_PRIORITY = 100, 35
NUM_RANKS = 2 * (MOST_PRIORITY + 1)  # of a page: twice its priority, and one more when it is protected
Ranks = bytearray | memoryview
PROTECTED_SHARE = 0.8  # of all frames: most protected pages. Source: the usual segmented LRU, with a fifth on probation


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


class PrefixIndex:
    """Pages and states by key, position and recency. Frames are only numbers here; the caller owns the pool.

    Invariants: a present page's parent is present and ranks at least as high; a pinned entry and its ancestors are in no recency list; a
    state's page is present. Attributes (arrays indexed by frame): ref, parent (of a page: the previous page; of a state: its page),
    position (end token of the page or state), stamp (clock of the last touch), rank (of a page: `2 * priority`, odd when protected).

    segmented: pages that were hit are protected: they leave after all others of their priority, up to `PROTECTED_SHARE` of the frames.
    ranks: where ranks are kept, by frame; None for private memory. page_tokens: remembers the tokens of pages; None compares the first
    and the last one.
    """

    def __init__(
        self,
        num_frames: int,
        *,
        segmented: bool = False,
        ranks: Ranks | None = None,
        page_tokens: PageTokens | None = None,
    ) -> None:
        self.num_frames = num_frames
        self.map: PageMap = DictPageMap(num_frames)
        self.clock = 0
        self.num_states = 0
        self._present = bytearray(num_frames)
        # Pages by rank, then states by the priority of their page.
        self._lists = RecencyLists(num_frames, NUM_RANKS + MOST_PRIORITY + 1)
        self._protects = int(segmented)
        self.rank: Ranks = bytearray(num_frames) if ranks is None else ranks
        self.pages_of_rank = _ints(NUM_RANKS, 0)
        self.num_raised = 0  # pages above the default priority
        self.num_protected = 0
        self.num_unreachable = 0  # pages without a state at or below them: nothing can be restored through them
        self._page_tokens = page_tokens
        self.parent, self.ref, self.num_children = _ints(num_frames, NONE), _ints(num_frames, 0), _ints(num_frames, 0)
        self.state_of = _ints(num_frames, NONE)  # page -> its state
        self._leads_to = _ints(num_frames, 0)  # page -> children through which states are reached, and its own state
        self._chain = _ints(num_frames, NONE)  # a state's frame -> its next frame
        self.position, self.first_token, self.last_token = _ints(num_frames, 0), _ints(num_frames, 0), _ints(num_frames, 0)
        self.stamp = array("q", [0]) * num_frames
        self.reason = bytearray(num_frames)
        self.drops = 0  # pages and states whose bytes were found wrong
        self._dead: set[int] = set()  # dropped while pinned; freed with the last pin

    def __len__(self) -> int:
        return len(self.map)

    def use_map(self, new: PageMap) -> None:
        """Keep keys in another, empty map from now on."""
        frames = self.map.frames()
        new.insert([self.map.key(frame) for frame in frames], frames)
        self.map = new

    @property
    def metadata_bytes(self) -> int:
        """Bytes of all arrays and of the map of keys."""
        links = (self.parent, self.ref, self.num_children, self.state_of, self._chain, self._leads_to)
        facts = (self.position, self.first_token, self.last_token, self.stamp)
        flags = len(self.reason) + len(self._present) + len(self.rank)
        tokens = self._page_tokens.num_bytes if self._page_tokens is not None else 0
        return sum(len(a) * a.itemsize for a in (*links, *facts)) + flags + tokens + self._lists.num_bytes + self.map.num_bytes

    def key(self, page: int) -> bytes:
        """The key under which `page` was inserted."""
        assert self._present[page], f"frame {page} holds no page"
        return self.map.key(page)

    def pages(self) -> list[int]:
        """Frames of all pages that can be found, in no order."""
        return self.map.frames()

    def first_foreign(self, path: Sequence[int], tokens: Sequence[int], size: int) -> int | None:
        """Number of the first page of `path` whose tokens are not those of the prompt; None when all agree. Keys cannot collide: this would
        be a defect of ours. Compares the ends of the last page, or all ids of all pages where they are remembered.
        """
        for at, page in enumerate(path):
            if self._page_tokens is not None and self._page_tokens.differ(page, tokens[size * at : size * (at + 1)]):
                return at
        at = len(path) - 1
        ends = (self.first_token[path[at]], self.last_token[path[at]])
        return None if ends == (tokens[size * at], tokens[size * (at + 1) - 1]) else at

    # -- lookup and pins ---------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Frames of the leading keys that are present."""
        return self.map.match(keys)

    def find(self, key: bytes) -> int:
        """The frame of one key, or -1."""
        return next(iter(self.map.match([key])), NONE)

    def deepest_state(self, path: Sequence[int], num_pages: int) -> int:
        """The state at the deepest position among the first `num_pages` pages of `path`, or -1."""
        state_of = self.state_of
        for index in range(min(num_pages, len(path)) - 1, -1, -1):
            if state_of[path[index]] != NONE:
                return state_of[path[index]]
        return NONE

    def states_on(self, path: Sequence[int]) -> list[int]:
        """All states on `path`, shallowest first."""
        return [self.state_of[page] for page in path if self.state_of[page] != NONE]

    def pin(self, path: Sequence[int]) -> None:
        """Keep a whole path (from its root) from being evicted. Pins nest."""
        ref, prev, succ = self.ref, self._lists.prev, self._lists.next
        for frame in path:
            count = ref[frame]
            ref[frame] = count + 1
            if count == 0:
                before, after = prev[frame], succ[frame]
                succ[before] = after
                prev[after] = before

    def unpin(self, path: Sequence[int], priority: int = 0, num_hit: int = 0) -> list[int]:
        """Undo one `pin`; pages without pins become the most recent ones of their rank, the root last. Returns frames of dropped pages
        to free. priority: that all of them have at least from now on. num_hit: leading pages that are protected from now on.
        """
        self.clock += 1
        clock, ref, stamp, ranks = self.clock, self.ref, self.stamp, self.rank
        prev, succ = self._lists.prev, self._lists.next
        floor, at, current, head, last = 2 * priority, len(path), NONE, NONE, NONE
        num_hit *= self._protects
        released: list[int] = []
        for frame in reversed(path):
            at -= 1
            count = ref[frame] - 1
            assert count >= 0, f"page frame {frame} is unpinned twice"
            ref[frame] = count
            rank = ranks[frame]
            if rank < floor or at < num_hit:
                rank = self._raise(frame, floor + (at < num_hit))
            if count:
                continue
            if self._dead and frame in self._dead:
                released += self._bury(frame)
                continue
            stamp[frame] = clock
            if rank != current:
                if head != NONE:
                    succ[last], prev[head] = head, last
                current, head = rank, self._lists.head(rank)
                last = prev[head]
            succ[last] = frame
            prev[frame] = last
            last = frame
        if head != NONE:
            succ[last], prev[head] = head, last
        if self.num_protected > PROTECTED_SHARE * self.num_frames:
            self._end_protection()
        return released

    def pin_state(self, state: int) -> None:
        """Keep a state from being evicted alone; its path must be pinned too."""
        self.ref[state] += 1
        self._lists.unlink(state)

    def unpin_state(self, state: int) -> None:
        self.ref[state] -= 1
        assert self.ref[state] >= 0, f"state {state} is unpinned twice"
        if self.ref[state] == 0:
            self.touch_state(state)

    def touch_state(self, state: int) -> None:
        """Make an unpinned state the most recent one of its page's priority."""
        if self.ref[state]:
            return
        self.clock += 1
        self.stamp[state] = self.clock
        self._lists.unlink(state)
        self._lists.push(NUM_RANKS + self.priority(self.parent[state]), state)

    # -- ranks -------------------------------------------------------------------------------------------------------------

    def priority(self, page: int) -> int:
        """The priority of a present page and of its state."""
        return self.rank[page] >> 1

    def is_raised(self, frame: int) -> bool:
        """Whether the frame holds a page above the default priority."""
        return self._present[frame] == 1 and self.rank[frame] >> 1 > DEFAULT_PRIORITY

    def _raise(self, page: int, rank: int) -> int:
        """Let a page rank at least at `rank`. The caller links it. Returns its rank."""
        if self.rank[page] < rank:
            self._set_rank(page, rank)
        return self.rank[page]

    def _set_rank(self, page: int, rank: int) -> None:
        before = self.rank[page]
        self._count(before, -1)
        self._count(rank, 1)
        self.rank[page] = rank
        state = self.state_of[page]
        if state != NONE and before >> 1 != rank >> 1 and self._lists.holds(state):
            self._lists.unlink(state)
            self._lists.push(NUM_RANKS + (rank >> 1), state)

    def _count(self, rank: int, pages: int) -> None:
        self.pages_of_rank[rank] += pages
        self.num_protected += (rank & 1) * pages
        if rank >> 1 > DEFAULT_PRIORITY:
            self.num_raised += pages

    def _relink(self, page: int, rank: int) -> None:
        """Move a page to the recent end of another rank; a pinned one goes there with its last pin."""
        self._set_rank(page, rank)
        if self.ref[page] == 0:
            self._lists.unlink(page)
            self._lists.push(rank, page)

    def lower(self, page: int) -> None:
        """The raised priority of a page is over; what lies below it was lowered before. It becomes a recent page of default priority,
        protected if there are such: pages below it may be."""
        self._relink(page, 2 * DEFAULT_PRIORITY + self._protects)

    def _end_protection(self) -> None:
        """The least recent protected pages go back on probation, the lowest priority first."""
        while self.num_protected > PROTECTED_SHARE * self.num_frames:
            rank = self._lists.lowest(1, NUM_RANKS, 2)
            if rank == NONE:
                return
            self._relink(self._lists.oldest(rank), rank - 1)

    def retire(self, tail: Sequence[int]) -> None:
        """Make pages that lead to no others, consecutive and the last one a leaf, the next to leave among their rank. Those above a page
        with other pages below it, or above a pinned one, stay where they are."""
        begin, children = len(tail), 0
        while begin and self.ref[tail[begin - 1]] == 0 and self.num_children[tail[begin - 1]] == children:
            begin, children = begin - 1, 1
        for frame in tail[begin:]:
            self.stamp[frame] = 0
            self._lists.unlink(frame)
            self._lists.push_back(self.rank[frame], frame)

    def forget_ranks(self) -> None:
        """Let everything stored leave before what comes from now on. O(ranks), and one pass over bytes."""
        pages, states = self._lists.used(0, NUM_RANKS), self._lists.used(NUM_RANKS, NUM_RANKS + MOST_PRIORITY + 1)
        self._lists.empty_into(pages, 0)
        self._lists.empty_into(states, NUM_RANKS)
        self.rank[:] = bytes(self.num_frames)
        self.pages_of_rank = _ints(NUM_RANKS, 0)
        self.pages_of_rank[0] = self._present.count(1)
        self.num_raised = self.num_protected = 0

    # -- insertion ---------------------------------------------------------------------------------------------------------

    def insert(
        self,
        parent: int,
        frames: Sequence[int],
        keys: Sequence[bytes],
        first_page: int,
        tokens: Sequence[int],
        size: int,
        priority: int = DEFAULT_PRIORITY,
    ) -> None:
        """Add consecutive pages `first_page`, ... of `size` tokens below `parent` (-1: none), pinned once by the caller.

        tokens: the whole prompt. priority: at most the default; `unpin` gives a higher one to the whole path. The copies of the pages are
        already enqueued.
        """
        assert priority <= DEFAULT_PRIORITY, f"pages are inserted with priority {priority}"
        assert parent == NONE or self._present[parent], f"parent frame {parent} of page {first_page} is absent"
        if not frames:
            return
        self.map.insert(keys, frames)
        if parent != NONE:
            self.num_children[parent] += 1
        present, parent_of, position, ref, num_children = self._present, self.parent, self.position, self.ref, self.num_children
        ranks, rank = self.rank, 2 * priority
        self._count(rank, len(frames))
        self.num_unreachable += len(frames)
        leads_to = self._leads_to
        first_token, last_token = self.first_token, self.last_token
        begin = first_page * size
        for frame in frames:
            end = begin + size
            present[frame] = 1
            ranks[frame] = rank
            parent_of[frame] = parent
            first_token[frame] = tokens[begin]
            last_token[frame] = tokens[end - 1]
            position[frame] = end
            ref[frame] = num_children[frame] = 1
            leads_to[frame] = 0
            parent, begin = frame, end
        num_children[parent] = 0
        if self._page_tokens is not None:
            self._page_tokens.store(frames, tokens[first_page * size : begin])

    def adopt(self, frame: int, key: bytes, parent: int, position: int, first_token: int, last_token: int) -> None:
        """A page that a former owner of the arena left, below a present parent, with the rank that stands in `rank`. Unpinned;
        `list_adopted` follows once for all."""
        assert parent == NONE or self._present[parent], f"parent frame {parent} of the page at {position} is absent"
        self.map.insert([key], [frame])
        self._present[frame] = 1
        self.parent[frame], self.position[frame] = parent, position
        self.first_token[frame], self.last_token[frame] = first_token, last_token
        self._leads_to[frame] = 0
        self.num_unreachable += 1
        if self._page_tokens is not None:
            self._page_tokens.forget(frame)
        if parent != NONE:
            self.num_children[parent] += 1

    def list_adopted(self, frames: Sequence[int]) -> None:
        """Make adopted pages evictable, the deepest the least recent. None keeps a protection, and each the highest priority below it."""
        for frame in sorted(frames, key=self.position.__getitem__, reverse=True):
            self.rank[frame] = min(self.rank[frame] & ~1, NUM_RANKS - 2)
            if (parent := self.parent[frame]) != NONE:
                self.rank[parent] = max(self.rank[parent] & ~1, self.rank[frame])
            self._count(self.rank[frame], 1)
            self._lists.push(self.rank[frame], frame)

    def add_state(self, page: int, frames: Sequence[int], reason: StateReason) -> int:
        """Attach a state that fills `frames` to a present page. Returns the state's id."""
        assert self._present[page], f"frame {page} holds no page"
        assert self.state_of[page] == NONE, f"page frame {page} has a state already"
        for frame, following in zip(frames, [*frames[1:], NONE], strict=True):
            self._chain[frame] = following
        state = frames[0]
        self.state_of[page], self.parent[state], self.position[state] = state, page, self.position[page]
        self.ref[state], self.reason[state] = 0, reason
        self._lists.prev[state] = self._lists.next[state] = NONE
        self.num_states += 1
        self._lead_to_state(page)
        self.touch_state(state)
        return state

    def _lead_to_state(self, page: int) -> None:
        """A state was added at `page`. Costs as much as the pages that it opens."""
        leads_to = self._leads_to
        while page != NONE:
            leads_to[page] += 1
            if leads_to[page] > 1:
                return
            self.num_unreachable -= 1
            page = self.parent[page]

    def _lose_state(self, page: int) -> None:
        """The state at `page` is gone."""
        leads_to = self._leads_to
        while page != NONE:
            leads_to[page] -= 1
            if leads_to[page]:
                return
            self.num_unreachable += 1
            page = self.parent[page]

    def state_frames(self, state: int) -> list[int]:
        """The frames of a state, in the order of its bytes."""
        frames = [state]
        while (following := self._chain[frames[-1]]) != NONE:
            frames.append(following)
        return frames

    # -- eviction ----------------------------------------------------------------------------------------------------------

    def oldest_state(self) -> int:
        """The least recent listed state of the lowest priority, or -1."""
        number = self._lists.lowest(NUM_RANKS, NUM_RANKS + MOST_PRIORITY + 1)
        return NONE if number == NONE else self._lists.oldest(number)

    def lowest_page_priority(self) -> int:
        """The priority of the page that would leave next, or -1."""
        rank = self._lists.lowest(0, NUM_RANKS)
        return NONE if rank == NONE else rank >> 1

    def unlist_state(self, state: int) -> None:
        """Take a state that is worth its memory out of the list until it is touched again; it then leaves with its page only."""
        self._lists.unlink(state)

    def worth(self, state: int, limit_pages: int) -> int:
        """Tokens between a state and the next shallower one of its path; the walk stops after `limit_pages` pages."""
        page = self.parent[state]
        end = self.position[page]
        for _ in range(limit_pages):
            page = self.parent[page]
            if page == NONE:
                return end
            if self.state_of[page] != NONE:
                return end - self.position[page]
        return end - self.position[page]

    def evict_pages(self, need: int, newest_stamp: int) -> list[int]:
        """Remove the least recent pages of the lowest rank that were touched at `newest_stamp` or before, leaves first, until `need` frames
        are free or a state went along. Returns the frames to free, pages first in their order of removal."""
        rank = self._lists.lowest(0, NUM_RANKS)
        if rank == NONE:
            return []
        head, succ, stamp = self._lists.head(rank), self._lists.next, self.stamp
        present, parent_of, children, state_of = self._present, self.parent, self.num_children, self.state_of
        freed: list[int] = []
        page, state = succ[head], NONE
        for _ in range(need):
            if page == head or stamp[page] > newest_stamp:
                break
            assert not children[page], f"page frame {page} is the least recent one and has children"
            present[page] = 0
            parent = parent_of[page]
            if parent != NONE:
                children[parent] -= 1
            freed.append(page)
            state, page = state_of[page], succ[page]
            if state != NONE:
                break
        succ[head] = page
        self._lists.prev[page] = head
        if freed:
            self._count(rank, -len(freed))
            self.map.remove(freed)
        num_pages = len(freed)
        if state != NONE:
            freed += self.evict_state(state)
        self.num_unreachable -= num_pages
        return freed

    def evict_state(self, state: int) -> list[int]:
        """Remove a state alone. Returns the frames to free."""
        assert self.ref[state] == 0, f"state {state} is pinned"
        self._lists.unlink(state)
        self.state_of[self.parent[state]] = NONE
        self.num_states -= 1
        self._lose_state(self.parent[state])
        return self.state_frames(state)

    def drop(self, page: int) -> list[int]:
        """Remove a page whose bytes are wrong and all pages below it. Pinned ones vanish from lookups now and free their frames
        with their last pin. Returns the frames to free now. O(entries): this is an alarm, not traffic."""
        self.drops += 1
        below = {page}
        for frame in sorted(self.pages(), key=self.position.__getitem__):
            if self.parent[frame] in below:
                below.add(frame)
        freed: list[int] = []
        for frame in sorted(below, key=self.position.__getitem__, reverse=True):
            self.map.remove([frame])
            self._dead.add(frame)
            if self.ref[frame] == 0:
                self._lists.unlink(frame)
                freed += self._bury(frame)
        return freed

    def _bury(self, page: int) -> list[int]:
        """Forget an unlinked page and its state; returns their frames."""
        if page in self._dead:
            self._dead.discard(page)
        else:
            self.map.remove([page])
        self._present[page] = 0
        self._count(self.rank[page], -1)
        frames = [page]
        state = self.state_of[page]
        if state != NONE:
            assert self.ref[state] == 0, f"state {state} is pinned but its page is not"
            frames += self.evict_state(state)
        self.num_unreachable -= 1
        if self.parent[page] != NONE:
            self.num_children[self.parent[page]] -= 1
        return frames

    def has_dropped(self, path: Sequence[int]) -> bool:
        """Whether a pinned path contains a page that was dropped meanwhile."""
        return bool(self._dead) and not self._dead.isdisjoint(path)

    def newest_state(self, reason: StateReason) -> int:
        """The most recent listed state of that reason, else the most recent of any, else -1."""
        newest = next(self.states_by_recency(), NONE)
        return next((state for state in self.states_by_recency() if self.reason[state] == reason), newest)

    def states_by_recency(self) -> Iterator[int]:
        """Listed states, most recent first."""
        numbers = self._lists.used(NUM_RANKS, NUM_RANKS + MOST_PRIORITY + 1)
        stamp = self.stamp
        return merge(*(self._lists.newest_first(number) for number in numbers), key=lambda state: -stamp[state])

    def path_to(self, page: int) -> list[int]:
        """Frames from the root to `page`."""
        path = []
        while page != NONE:
            path.append(page)
            page = self.parent[page]
        return path[::-1]

    def by_recency(self) -> Iterator[int]:
        """Unpinned pages in the order in which they would leave."""
        for rank in self._lists.used(0, NUM_RANKS):
            yield from self._lists.oldest_first(rank)


def _ints(size: int, value: int) -> array[int]:
    return array("i", [value]) * size
