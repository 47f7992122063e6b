"""Which prefixes are stored: a map of page keys, prefix-closed, with recency lists and pins.

An entry's id is its frame (a state's is its first frame), so every attribute is one int array indexed by frame and there is no
Python object per page: a collector pass over 600,000 entries would otherwise stop every open stream for 0.2 s.

Paths are touched deepest page first. Every parent is then more recent than its children, so the least recent unpinned page is
always a leaf and eviction is a pop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum

from hicache.page_map import NONE as NONE
from hicache.page_map import DictPageMap, PageMap


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

    Invariants: a present page's parent is present; a pinned entry and its ancestors are in no recency list; a state's page is
    present. Attributes (arrays indexed by frame): ref, parent (of a page: the previous page; of a state: its page), position (end
    token of the page or state), stamp (clock of the last touch).
    """

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.map: PageMap = DictPageMap(num_frames)
        self.clock = 0
        self.num_states = 0
        self._present = bytearray(num_frames)
        size = num_frames + 2
        self._pages, self._states = num_frames, num_frames + 1  # list heads; next of a head is the least recent entry
        self.parent, self.ref, self.num_children = _ints(size, NONE), _ints(size, 0), _ints(size, 0)
        self._prev, self._next = _ints(size, NONE), _ints(size, NONE)
        self.state_of = _ints(size, NONE)  # page -> its state
        self._chain = _ints(size, NONE)  # a state's frame -> its next frame
        self.position, self.first_token, self.last_token = _ints(size, 0), _ints(size, 0), _ints(size, 0)
        self.stamp = array("q", [0]) * size
        self.reason = bytearray(size)
        self.drops = 0  # pages and states whose bytes were found wrong
        self._dead: set[int] = set()  # dropped while pinned; freed with the last pin
        for head in (self._pages, self._states):
            self._prev[head] = self._next[head] = head

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
        links = (self.parent, self.ref, self.num_children, self._prev, self._next, self.state_of, self._chain)
        facts = (self.position, self.first_token, self.last_token, self.stamp)
        return sum(len(a) * a.itemsize for a in (*links, *facts)) + len(self.reason) + len(self._present) + self.map.num_bytes

    def key(self, page: int) -> bytes:
        """The key under which `page` was inserted."""
        assert self._present[page], f"frame {page} holds no page"
        return self.map.key(page)

    def pages(self) -> list[int]:
        """Frames of all pages that can be found, in no order."""
        return self.map.frames()

    def check_page(self, page: int, tokens: Sequence[int], size: int) -> None:
        """A key cannot collide; a page of `size` tokens behind the wrong key would be a defect of ours, and its end tokens show it."""
        end = self.position[page]
        stored, asked = (self.first_token[page], self.last_token[page]), (tokens[end - size], tokens[end - 1])
        assert stored == asked, f"the page at {end} begins and ends with tokens {stored}, the prompt's with {asked}"

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
        ref, prev, succ = self.ref, self._prev, self._next
        for frame in path:
            count = ref[frame]
            ref[frame] = count + 1
            if count == 0:
                before, after = prev[frame], succ[frame]
                succ[before] = after
                prev[after] = before

    def unpin(self, path: Sequence[int]) -> list[int]:
        """Undo one `pin`; pages without pins become the most recent ones, the root last. Returns frames of dropped pages to free."""
        self.clock += 1
        clock, ref, prev, succ, stamp, head = self.clock, self.ref, self._prev, self._next, self.stamp, self._pages
        released: list[int] = []
        last = prev[head]
        for frame in reversed(path):
            count = ref[frame] - 1
            assert count >= 0, f"page frame {frame} is unpinned twice"
            ref[frame] = count
            if count:
                continue
            if self._dead and frame in self._dead:
                released += self._bury(frame)
                continue
            stamp[frame] = clock
            succ[last] = frame
            prev[frame] = last
            last = frame
        succ[last] = head
        prev[head] = last
        return released

    def pin_state(self, state: int) -> None:
        """Keep a state from being evicted alone; its path must be pinned too."""
        self.ref[state] += 1
        self._unlink(state)

    def unpin_state(self, state: int) -> None:
        self.ref[state] -= 1
        assert self.ref[state] >= 0, f"state {state} is unpinned twice"
        if self.ref[state] == 0:
            self.touch_state(state)

    def touch_state(self, state: int) -> None:
        """Make an unpinned state the most recent one."""
        if self.ref[state]:
            return
        self.clock += 1
        self.stamp[state] = self.clock
        self._unlink(state)
        self._push(self._states, state)

    # -- insertion ---------------------------------------------------------------------------------------------------------

    def insert(self, parent: int, frames: Sequence[int], keys: Sequence[bytes], first_page: int, tokens: Sequence[int], size: int) -> None:
        """Add consecutive pages `first_page`, ... of `size` tokens below `parent` (-1: none), pinned once by the caller.

        tokens: the whole prompt. The copies of the pages are already enqueued.
        """
        assert parent == NONE or self._present[parent], f"parent frame {parent} of page {first_page} is absent"
        if not frames:
            return
        self.map.insert(keys, frames)
        if parent != NONE:
            self.num_children[parent] += 1
        present, parent_of, position, ref, num_children = self._present, self.parent, self.position, self.ref, self.num_children
        first_token, last_token = self.first_token, self.last_token
        begin = first_page * size
        for frame in frames:
            end = begin + size
            present[frame] = 1
            parent_of[frame] = parent
            first_token[frame] = tokens[begin]
            last_token[frame] = tokens[end - 1]
            position[frame] = end
            ref[frame] = num_children[frame] = 1
            parent, begin = frame, end
        num_children[parent] = 0

    def adopt(self, frame: int, key: bytes, parent: int, position: int, first_token: int, last_token: int) -> None:
        """A page that a former owner of the arena left, below a present parent. Unpinned; `list_adopted` follows once for all."""
        assert parent == NONE or self._present[parent], f"parent frame {parent} of the page at {position} is absent"
        self.map.insert([key], [frame])
        self._present[frame] = 1
        self.parent[frame], self.position[frame] = parent, position
        self.first_token[frame], self.last_token[frame] = first_token, last_token
        if parent != NONE:
            self.num_children[parent] += 1

    def list_adopted(self, frames: Sequence[int]) -> None:
        """Make adopted pages evictable, the deepest the least recent."""
        for frame in sorted(frames, key=self.position.__getitem__, reverse=True):
            self._push(self._pages, frame)

    def add_state(self, page: int, frames: Sequence[int], reason: StateReason) -> int:
        """Attach a state that fills `frames` to a present page. Returns the state's id."""
        assert self._present[page], f"frame {page} holds no page"
        assert self.state_of[page] == NONE, f"page frame {page} has a state already"
        for frame, following in zip(frames, [*frames[1:], NONE], strict=True):
            self._chain[frame] = following
        state = frames[0]
        self.state_of[page], self.parent[state], self.position[state] = state, page, self.position[page]
        self.ref[state], self.reason[state] = 0, reason
        self._prev[state] = self._next[state] = NONE
        self.num_states += 1
        self.touch_state(state)
        return state

    def state_frames(self, state: int) -> list[int]:
        """The frames of a state, in the order of its bytes."""
        frames = [state]
        while (following := self._chain[frames[-1]]) != NONE:
            frames.append(following)
        return frames

    # -- eviction ----------------------------------------------------------------------------------------------------------

    def oldest_state(self) -> int:
        """The least recent listed state, or -1."""
        state = self._next[self._states]
        return NONE if state == self._states else state

    def unlist_state(self, state: int) -> None:
        """Take a state that is worth its memory out of the list until it is touched again; it then leaves with its page only."""
        self._unlink(state)

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
        """Remove the least recent pages that were touched at `newest_stamp` or before, leaves first, until `need` frames are free or
        a state went along. Returns the frames to free, pages first in their order of removal."""
        head, succ, stamp = self._pages, self._next, self.stamp
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
        self._prev[page] = head
        if freed:
            self.map.remove(freed)
        return freed if state == NONE else freed + self.evict_state(state)

    def evict_state(self, state: int) -> list[int]:
        """Remove a state alone. Returns the frames to free."""
        assert self.ref[state] == 0, f"state {state} is pinned"
        self._unlink(state)
        self.state_of[self.parent[state]] = NONE
        self.num_states -= 1
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
                self._unlink(frame)
                freed += self._bury(frame)
        return freed

    def _bury(self, page: int) -> list[int]:
        """Forget an unlinked page and its state; returns their frames."""
        if page in self._dead:
            self._dead.discard(page)
        else:
            self.map.remove([page])
        self._present[page] = 0
        frames = [page]
        state = self.state_of[page]
        if state != NONE:
            assert self.ref[state] == 0, f"state {state} is pinned but its page is not"
            frames += self.evict_state(state)
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
        state = self._prev[self._states]
        while state != self._states:
            yield state
            state = self._prev[state]

    def path_to(self, page: int) -> list[int]:
        """Frames from the root to `page`."""
        path = []
        while page != NONE:
            path.append(page)
            page = self.parent[page]
        return path[::-1]

    # -- lists -------------------------------------------------------------------------------------------------------------

    def _push(self, head: int, entry: int) -> None:
        last = self._prev[head]
        self._next[last] = entry
        self._prev[entry], self._next[entry] = last, head
        self._prev[head] = entry

    def _unlink(self, entry: int) -> None:
        before, after = self._prev[entry], self._next[entry]
        if before == NONE:
            return
        self._next[before], self._prev[after] = after, before
        self._prev[entry] = self._next[entry] = NONE

    def by_recency(self) -> Iterator[int]:
        """Unpinned pages, least recent first."""
        frame = self._next[self._pages]
        while frame != self._pages:
            yield frame
            frame = self._next[frame]


def _ints(size: int, value: int) -> array[int]:
    return array("i", [value]) * size
