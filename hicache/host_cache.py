"""Pool and index together: matched paths, room for new entries, eviction. Knows frames and keys, never bytes or sequences."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from hicache.host_pool import FramePool, Owner
from hicache.index import NONE, PrefixIndex, StateReason
from hicache.invariants import check_cache
from hicache.page_tokens import PageTokens
from hicache.policy import Miss, dispensable_intervals, page_goes_from, restore_cap, superseded, surplus_fork
from hicache.priority import INHERITED_S, UNUSED, RaisedPaths, Use
from hicache.ranking import DEFAULT_PRIORITY, Ranks

# One eviction by itself costs ten times what it costs among others, so a few pages of a large arena leave together, before they have to.
_AHEAD_SHARE, _MOST_AHEAD = 1 / 1024, 64


class HostCache:
    """What is stored, in frames. One thread; every call is O(its own pages), eviction O(1) per entry.

    frames_per_state: frames that one window state fills. max_states: most states, 0 = no cap. state_interval: distance of the
    states within a long prompt, 0 = none. on_free, num_usable: see `FramePool`. segmented, ranks: see `PrefixIndex`. scan_share: of all
    frames; what a prompt with more new pages leaves behind goes before everything else of its priority. audit_tokens: remember the
    tokens of all pages.
    """

    def __init__(
        self,
        num_frames: int,
        page_tokens: int,
        frames_per_state: int,
        max_states: int = 0,
        state_interval: int = 0,
        on_free: Callable[[Sequence[int]], None] | None = None,
        num_usable: int | None = None,
        *,
        segmented: bool = False,
        scan_share: float = 1.0,
        audit_tokens: bool = False,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert frames_per_state > 0, f"frames_per_state is {frames_per_state}"
        self.page_tokens, self.frames_per_state = page_tokens, frames_per_state
        self.max_states, self.state_interval = max_states, state_interval
        self.pool = FramePool(num_frames, on_free, num_usable)
        page_ids = PageTokens(num_frames, page_tokens) if audit_tokens else None
        self.index = PrefixIndex(num_frames, segmented=segmented, ranks=ranks, page_tokens=page_ids)
        self._raised = RaisedPaths(self.index, clock)
        self.scan_pages = scan_share * num_frames
        self._ahead = max(1, min(_MOST_AHEAD, int(num_frames * _AHEAD_SHARE)))
        self.evicted_pages = 0
        self.refused_priorities = 0  # paths that would have raised too much of the arena
        self.evicted_frames: Counter[str] = Counter()

    @property
    def metadata_bytes(self) -> int:
        """Bytes of everything that is known about frames."""
        return self.index.metadata_bytes + self.pool.metadata_bytes + self._raised.num_bytes

    def make_room(self, count: int) -> bool:
        """Evict until `count` frames are free. False when too little is evictable; what was evicted stays evicted."""
        index = self.index
        while (need := count - self.pool.num_free) > 0:
            state, newest_stamp = self._cheap_state()
            frames = index.evict_pages(max(need, self._ahead), newest_stamp)
            if frames:
                self._free_pages(frames)
            elif state != NONE:
                self.remove_state(state, "lru")
            else:
                return False
        return True

    def _cheap_state(self) -> tuple[int, int]:
        """The state that may be evicted alone (-1: none), and the clock up to which pages go before it: all when it has the higher
        priority, none when it has the lower one."""
        index = self.index
        full_worth = self.frames_per_state * self.page_tokens
        while (state := index.states.oldest()) != NONE:
            worth = index.states.worth(state, self.frames_per_state)
            if worth < full_worth:
                above = index.ranks.priority(index.parent[state]) - index.ranks.lowest_priority()
                if above:
                    return state, index.lists.clock if above > 0 else NONE
                return state, index.lists.clock - page_goes_from(index.lists.clock - index.lists.stamp[state], worth, full_worth)
            index.states.unlist(state)  # it saves more than its memory costs: it leaves with its page
        return NONE, index.lists.clock

    def _free_pages(self, frames: list[int]) -> None:
        """Give back evicted pages; the last one's state, if it had one, follows them in `frames`."""
        with_state = len(frames) > self.frames_per_state and self.pool.owner(frames[-1]) is Owner.STATE
        num_pages = len(frames) - (self.frames_per_state if with_state else 0)
        self.evicted_pages += num_pages
        self.evicted_frames["page/lru"] += num_pages
        self.evicted_frames["state/page"] += len(frames) - num_pages
        self.pool.free(frames)

    def remove_state(self, state: int, why: str) -> None:
        """Evict a state; its page stays."""
        frames = self.index.states.remove(state)
        self.evicted_frames[f"state/{why}"] += len(frames)
        self.pool.free(frames)

    def unpin(self, path: Sequence[int], use: Use = UNUSED) -> None:
        """Let go of a path; `use` says how long it is to stay."""
        priority = use.priority
        if priority > DEFAULT_PRIORITY:
            if self._raised.allows(path):
                self._raised.raise_for(path, use.seconds)
            else:
                priority = DEFAULT_PRIORITY
                self.refused_priorities += 1
        dropped = self.index.unpin(path, priority, use.num_hit)
        self.pool.free(dropped)
        if use.num_new > self.scan_pages and not dropped:
            self.index.retire(path[len(path) - use.num_new :])

    def expire(self) -> None:
        """Raised priorities whose time is over end. O(1) while there are none."""
        self._raised.expire()

    def inherit(self, frames: Sequence[int]) -> None:
        """Pages that a former owner of the arena left were adopted, with the ranks that they had."""
        index = self.index
        index.list_adopted(frames)
        raised = sorted(filter(index.is_raised, frames), key=index.position.__getitem__)
        if raised:
            self._raised.raise_for(raised, INHERITED_S)

    def forget(self) -> None:
        """Nothing that is stored will be looked for any more: it leaves before what comes."""
        self._raised.clear()
        self.index.forget_ranks()

    def drop(self, page: int) -> None:
        """Forget a page whose bytes are wrong, and everything below it."""
        before = len(self.index)
        self.pool.free(self.index.drop(page))
        self.evicted_pages += before - len(self.index)

    def reuse_state(self, page: int, reason: StateReason) -> bool:
        """Whether `page` has a state already; it becomes the most recent one, and keeps the more lasting of the two reasons."""
        index, state = self.index, self.index.states.of[page]
        if state == NONE:
            return False
        index.states.reason[state] = min(index.states.reason[state], reason)
        index.states.touch(state)
        return True

    def room_for_state(self, path: Sequence[int], *, evict: bool) -> bool:
        """Make room for one state at the end of `path`: free frames, then states that later prefills of this path superseded, then,
        with `evict`, other entries. False when the cap of states or the lack of frames forbids it."""
        need = self.frames_per_state
        if self.pool.num_free < need or self._at_cap():
            self._thin(path)
        if self._at_cap() and not (evict and self._evict_oldest_state()):
            return False
        return self.pool.num_free >= need or (evict and self.make_room(need))

    def _at_cap(self) -> bool:
        return self.max_states > 0 and len(self.index.states) >= self.max_states

    def _evict_oldest_state(self) -> bool:
        state = self.index.states.oldest()
        if state != NONE:
            self.remove_state(state, "cap")
        return state != NONE

    def _thin(self, path: Sequence[int]) -> None:
        index = self.index
        states = index.states.on(path)
        described = [(index.position[s], StateReason(index.states.reason[s])) for s in states]
        for at in {*superseded(described), *dispensable_intervals(described, self.state_interval)}:
            if index.ref[states[at]] == 0:
                self.remove_state(states[at], "superseded")

    def limit_forks(self, path: Sequence[int], most: int) -> None:
        """Before another fork state is kept on `path`: give up the least useful one if there are `most` already."""
        index = self.index
        states = index.states.on(path)
        at = surplus_fork([(index.position[s], StateReason(index.states.reason[s])) for s in states], most)
        if at is not None and index.ref[states[at]] == 0:
            self.remove_state(states[at], "fork")

    def restore_point(self, path: Sequence[int], num_tokens: int, keep_tokens: int, min_tokens: int) -> tuple[int, Miss | None]:
        """The state from which a prompt of `num_tokens` with stored pages `path` resumes, or -1 and why there is none."""
        cap, shortest = restore_cap(num_tokens, keep_tokens, self.page_tokens), max(min_tokens, self.page_tokens)
        if cap < shortest:
            return NONE, Miss.SHORT
        if not path:
            return NONE, Miss.NO_PAGE
        state = self.index.states.deepest(path, cap // self.page_tokens)
        if state != NONE and self.index.position[state] >= shortest:
            return state, None
        beyond = self.index.states.deepest(path, len(path))
        return NONE, Miss.NO_STATE if beyond in (NONE, state) else Miss.KEEP_CAP

    def check(self) -> None:
        """Assert every invariant that can be seen from outside. For tests: O(entries)."""
        check_cache(self)
