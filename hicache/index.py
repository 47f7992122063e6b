"""Which prefixes are stored: a map of page keys, prefix-closed, with recency lists and pins.

An entry's id is its frame (a state's is its first frame), so every attribute is one int array indexed by frame and there is no
Python object per page: a collector pass over 600,000 entries would otherwise stop every open stream for 0.2 s.

Paths are touched deepest page first, and a page ranks at least as high as those below it. So in the list of the lowest rank the least
recent unpinned page is always a leaf, and eviction is a pop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from hicache.page_map import NONE as NONE
from hicache.page_map import DictPageMap, PageMap
from hicache.page_tokens import PageTokens
from hicache.ranking import DEFAULT_PRIORITY, MOST_PRIORITY, NUM_RANKS, PageRanks, Ranks
from hicache.recency import RecencyLists
from hicache.states import StateReason as StateReason
from hicache.states import StateTable


class PrefixIndex:
    """Pages and states by key, position and recency. Frames are only numbers here; the caller owns the pool.

    Invariants: a present page's parent is present and ranks at least as high; a pinned entry and its ancestors are in no recency list; a
    state's page is present. Attributes: ref, parent (of a page: the previous page; of a state: its page) and position (end token of the
    page or state), arrays indexed by frame; states, ranks and lists, which know the rest.

    segmented, ranks: see `PageRanks`; without `ranks` they lie in private memory. page_tokens: remembers the tokens of pages; None compares
    the first and the last one.
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
        self._present = bytearray(num_frames)
        self._page_tokens = page_tokens
        self.parent, self.ref, self.num_children = _ints(num_frames, NONE), _ints(num_frames, 0), _ints(num_frames, 0)
        self.position, self.first_token, self.last_token = _ints(num_frames, 0), _ints(num_frames, 0), _ints(num_frames, 0)
        # Pages by rank, then states by the priority of their page.
        end = NUM_RANKS + MOST_PRIORITY + 1
        self.lists = RecencyLists(num_frames, end)
        kept = bytearray(num_frames) if ranks is None else ranks
        self.ranks = PageRanks(kept, self.ref, self.lists, lambda page: self.states.follow(page), segmented=segmented)
        self.states = StateTable(self.parent, self.position, self.ref, self.lists, NUM_RANKS, end, self.ranks.priority)
        self.num_pinned = 0  # pages
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
        arrays = (self.parent, self.ref, self.num_children, self.position, self.first_token, self.last_token)
        parts = self.lists.num_bytes + self.states.num_bytes + len(self.ranks.of) + len(self._present) + self.map.num_bytes
        tokens = self._page_tokens.num_bytes if self._page_tokens is not None else 0
        return sum(len(a) * a.itemsize for a in arrays) + parts + tokens

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
        if (known := self._page_tokens) is not None:
            for at, page in enumerate(path):
                if known.differ(page, tokens[size * at : size * (at + 1)]):
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

    def pin(self, path: Sequence[int]) -> None:
        """Keep a whole path (from its root) from being evicted. Pins nest."""
        ref, prev, succ = self.ref, self.lists.prev, self.lists.next
        self.num_pinned += len(path)
        for frame in path:
            count = ref[frame]
            ref[frame] = count + 1
            if count:
                self.num_pinned -= 1
            else:
                before, after = prev[frame], succ[frame]
                succ[before] = after
                prev[after] = before

    def unpin(self, path: Sequence[int], priority: int = 0, num_hit: int = 0) -> list[int]:
        """Undo one `pin`; pages without pins become the most recent ones of their rank, the root last. Returns frames of dropped pages
        to free. priority: that all of them have at least from now on. num_hit: leading pages that are protected from now on.
        """
        clock, stamp, prev, succ = self.lists.tick(), self.lists.stamp, self.lists.prev, self.lists.next
        ref, ranks = self.ref, self.ranks.of
        floor, at, current, head, last = 2 * priority, len(path), NONE, NONE, NONE
        num_hit *= self.ranks.protects
        released: list[int] = []
        self.num_pinned -= len(path)
        for frame in reversed(path):
            at -= 1
            count = ref[frame] - 1
            assert count >= 0, f"page frame {frame} is unpinned twice"
            ref[frame] = count
            rank = ranks[frame]
            if rank < floor or at < num_hit:
                rank = self.ranks.lift(frame, max(floor, rank) | (at < num_hit))
            if count:
                self.num_pinned += 1
                continue
            if self._dead and frame in self._dead:
                released += self._bury(frame)
                continue
            stamp[frame] = clock
            if rank != current:
                if head != NONE:
                    succ[last], prev[head] = head, last
                current, head = rank, self.lists.head(rank)
                last = prev[head]
            succ[last] = frame
            prev[frame] = last
            last = frame
        if head != NONE:
            succ[last], prev[head] = head, last
        self.ranks.end_protection()
        return released

    def is_raised(self, frame: int) -> bool:
        """Whether the frame holds a page above the default priority."""
        return self._present[frame] == 1 and self.ranks.priority(frame) > DEFAULT_PRIORITY

    def retire(self, tail: Sequence[int]) -> None:
        """Make pages that lead to no others, consecutive and the last one a leaf, the next to leave among their rank. Those above a page
        with other pages below it, or above a pinned one, stay where they are."""
        begin, children = len(tail), 0
        while begin and self.ref[tail[begin - 1]] == 0 and self.num_children[tail[begin - 1]] == children:
            begin, children = begin - 1, 1
        for frame in tail[begin:]:
            self.lists.stamp[frame] = 0
            self.lists.unlink(frame)
            self.lists.push_back(self.ranks.of[frame], frame)

    def forget_ranks(self) -> None:
        """Let everything stored leave before what comes from now on. O(ranks), and one pass over bytes."""
        self.ranks.forget(self._present.count(1))
        self.states.forget_priorities()

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
        ranks, rank = self.ranks.of, 2 * priority
        self.ranks.count(rank, len(frames))
        self.states.pages_added(frames)
        self.num_pinned += len(frames)
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
        self.states.pages_added([frame])
        if self._page_tokens is not None:
            self._page_tokens.forget(frame)
        if parent != NONE:
            self.num_children[parent] += 1

    def list_adopted(self, frames: Sequence[int]) -> None:
        """Make adopted pages evictable, the deepest the least recent. None keeps a protection, and each the highest priority below it."""
        for frame in sorted(frames, key=self.position.__getitem__, reverse=True):
            self.ranks.adopt(frame, self.parent[frame])

    def add_state(self, page: int, frames: Sequence[int], reason: StateReason) -> int:
        """Attach a state that fills `frames` to a present page. Returns the state's id."""
        assert self._present[page], f"frame {page} holds no page"
        return self.states.add(page, frames, reason)

    # -- eviction ----------------------------------------------------------------------------------------------------------

    def evict_pages(self, need: int, newest_stamp: int) -> list[int]:
        """Remove the least recent pages of the lowest rank that were touched at `newest_stamp` or before, leaves first, until `need` frames
        are free or a state went along. Returns the frames to free, pages first in their order of removal."""
        rank = self.ranks.lowest()
        if rank == NONE:
            return []
        head, succ, stamp = self.lists.head(rank), self.lists.next, self.lists.stamp
        present, parent_of, children, state_of = self._present, self.parent, self.num_children, self.states.of
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
        self.lists.prev[page] = head
        if freed:
            self.ranks.count(rank, -len(freed))
            self.map.remove(freed)
        num_pages = len(freed)
        if state != NONE:
            freed += self.states.remove(state)
        self.states.pages_removed(num_pages)
        return freed

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
                self.lists.unlink(frame)
                freed += self._bury(frame)
        return freed

    def _bury(self, page: int) -> list[int]:
        """Forget an unlinked page and its state; returns their frames."""
        if page in self._dead:
            self._dead.discard(page)
        else:
            self.map.remove([page])
        self._present[page] = 0
        self.ranks.count(self.ranks.of[page], -1)
        frames = [page]
        state = self.states.of[page]
        if state != NONE:
            assert self.ref[state] == 0, f"state {state} is pinned but its page is not"
            frames += self.states.remove(state)
        self.states.pages_removed(1)
        if self.parent[page] != NONE:
            self.num_children[self.parent[page]] -= 1
        return frames

    @property
    def num_dropped(self) -> int:
        """Pages that were dropped and are still pinned."""
        return len(self._dead)

    def has_dropped(self, path: Sequence[int]) -> bool:
        """Whether a pinned path contains a page that was dropped meanwhile."""
        return bool(self._dead) and not self._dead.isdisjoint(path)

    def path_to(self, page: int) -> list[int]:
        """Frames from the root to `page`."""
        path = []
        while page != NONE:
            path.append(page)
            page = self.parent[page]
        return path[::-1]

    def by_recency(self) -> Iterator[int]:
        """Unpinned pages in the order in which they would leave."""
        for rank in self.lists.used(0, NUM_RANKS):
            yield from self.lists.oldest_first(rank)


def _ints(size: int, value: int) -> array[int]:
    return array("i", [value]) * size
