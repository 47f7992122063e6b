"""The index against a naive dictionary model, its cost in memory, and its single operations."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.host_cache import HostCache
from hicache.index import NONE, StateReason
from hicache.keys import KeySpace
from hicache.native_page_map import open_page_map
from hicache.page_map import PageMap
from hicache.policy import Victim, victim
from hicache.priority import UNUSED, Use
from hicache.ranking import DEFAULT_PRIORITY
from hicache.reservation import PageReservation, StateReservation

PAGE, STATE_FRAMES = 1, 3
Make = Callable[[int], PageMap]
Prefix = tuple[int, ...]
PRIORITIES = (0, 20, DEFAULT_PRIORITY, DEFAULT_PRIORITY, DEFAULT_PRIORITY, 60, 100)


@pytest.fixture(scope="session")
def native_map(tmp_path_factory: pytest.TempPathFactory) -> Make:
    make = open_page_map(tmp_path_factory.mktemp("native"))
    if make is None:
        pytest.skip("no compiler")
    return make


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class NaiveCache:
    """Prefixes in dictionaries; every question is answered by a scan."""

    def __init__(self, num_frames: int, clock: Clock, *, segmented: bool = False, scan_share: float = 1.0) -> None:
        self.num_frames, self.time, self.clock, self.order = num_frames, clock, 0, 0
        self.protects, self.scan_pages = int(segmented), scan_share * num_frames
        self.pages: dict[Prefix, list[int]] = {}  # prefix -> [clock stamp, recency order]
        self.ranks: dict[Prefix, int] = {}
        self.ends: dict[Prefix, float] = {}  # of raised pages
        self.leases: set[float] = set()
        self.states: dict[Prefix, list[int]] = {}
        self.unlisted: set[Prefix] = set()
        self.pins: dict[Prefix, int] = {}

    @property
    def free(self) -> int:
        return self.num_frames - len(self.pages) - STATE_FRAMES * len(self.states)

    def match(self, tokens: Prefix) -> list[Prefix]:
        path = []
        for end in range(1, len(tokens) + 1):
            if tokens[:end] not in self.pages:
                break
            path.append(tokens[:end])
        return path

    def newest(self) -> int:
        self.order += 1
        return self.order

    def pin(self, path: list[Prefix]) -> None:
        for page in path:
            self.pins[page] = self.pins.get(page, 0) + 1

    def insert(self, page: Prefix, use: Use) -> None:
        self.pages[page], self.ranks[page] = [self.clock, 0], 2 * min(use.priority, DEFAULT_PRIORITY)
        self.ends.pop(page, None)
        self.pin([page])

    def set_rank(self, page: Prefix, rank: int) -> None:
        if page in self.states and page not in self.unlisted and rank // 2 != self.ranks[page] // 2:
            self.states[page][1] = self.newest()
        self.ranks[page] = rank

    def is_raised(self, page: Prefix) -> bool:
        return self.ranks[page] // 2 > DEFAULT_PRIORITY

    def raise_for(self, path: list[Prefix], seconds: float) -> None:
        end = self.time() + seconds
        while end in self.leases:
            end = math.nextafter(end, math.inf)
        if end < math.inf:
            self.leases.add(end)
        for page in path:
            self.ends[page] = max(self.ends[page], end) if self.is_raised(page) else end

    def expire(self) -> None:
        self.leases = {end for end in self.leases if end > self.time()}
        over = [page for page in self.pages if self.is_raised(page) and self.ends[page] <= self.time()]
        for page in sorted(over, key=lambda p: (self.ends[p], -len(p))):
            self.set_rank(page, 2 * DEFAULT_PRIORITY + self.protects)
            self.pages[page][1] = self.newest()

    def unpin(self, path: list[Prefix], use: Use) -> None:
        self.clock += 1
        priority = use.priority
        if priority > DEFAULT_PRIORITY:
            raised = sum(map(self.is_raised, self.pages)) + sum(not self.is_raised(page) for page in path)
            if raised <= self.num_frames / 2:
                self.raise_for(path, use.seconds)
            else:
                priority = DEFAULT_PRIORITY
        for at, page in reversed(list(enumerate(path))):
            protected = self.protects if at < use.num_hit else 0
            self.set_rank(page, max(self.ranks[page], 2 * priority) | protected)
            self.pins[page] -= 1
            if not self.pins[page]:
                self.pages[page] = [self.clock, self.newest()]
        self.end_protection()
        if use.num_new > self.scan_pages:
            self.retire(path[len(path) - use.num_new :])

    def end_protection(self) -> None:
        while sum(rank % 2 for rank in self.ranks.values()) > 0.8 * self.num_frames:
            loose = [page for page in self.pages if self.ranks[page] % 2 and not self.pins.get(page)]
            if not loose:
                return
            page = min(loose, key=lambda p: (self.ranks[p], self.pages[p][1]))
            self.set_rank(page, self.ranks[page] - 1)
            self.pages[page][1] = self.newest()

    def retire(self, tail: list[Prefix]) -> None:
        below: list[Prefix] = []
        for page in reversed(tail):
            children = [p for p in self.pages if len(p) == len(page) + 1 and p[: len(page)] == page]
            if self.pins.get(page) or children != below[:1]:
                break
            below.insert(0, page)
        for page in below:
            self.pages[page] = [0, min(entry[1] for entry in self.pages.values()) - 1]

    def forget(self) -> None:
        self.leases.clear()
        for page in sorted(self.pages, key=lambda p: (self.ranks[p], self.pages[p][1])):
            self.pages[page][1] = self.newest()
        for state in sorted(self.states, key=lambda s: (self.ranks[s] // 2, self.states[s][1])):
            self.states[state][1] = self.newest()
        self.ranks = dict.fromkeys(self.pages, 0)

    def touch_state(self, state: Prefix) -> None:
        self.clock += 1
        self.states[state] = [self.clock, self.newest()]
        self.unlisted.discard(state)

    def worth(self, state: Prefix) -> int:
        shallower = [s for s in self.states if len(s) < len(state) and state[: len(s)] == s]
        return len(state) - max(map(len, shallower), default=0)

    def evict_one(self) -> bool:
        loose = [p for p in self.pages if not self.pins.get(p)]
        page = min(loose, key=lambda p: (self.ranks[p], self.pages[p][1]), default=None)
        assert page is None or not any(q[: len(page)] == page and q != page for q in self.pages), "the first page to go is no leaf"
        for state in sorted(self.states, key=lambda s: (self.ranks[s] // 2, self.states[s][1])):
            if state not in self.unlisted and self.worth(state) >= STATE_FRAMES:
                self.unlisted.add(state)
            elif state not in self.unlisted:
                break
        else:
            state = None
        choice = self.choose(page, state)
        if choice is Victim.PAGE and page:
            del self.pages[page], self.ranks[page]
            self.states.pop(page, None)
            self.unlisted.discard(page)
        elif choice is Victim.STATE and state:
            del self.states[state]
        return choice is not Victim.NOTHING

    def choose(self, page: Prefix | None, state: Prefix | None) -> Victim:
        """The lower priority goes; of equal ones, whom age and worth say."""
        if page and state and self.ranks[page] // 2 != self.ranks[state] // 2:
            return Victim.PAGE if self.ranks[page] // 2 < self.ranks[state] // 2 else Victim.STATE
        return victim(
            self.clock - self.pages[page][0] if page else None,
            self.clock - self.states[state][0] if state else None,
            self.worth(state) if state else 0,
            STATE_FRAMES,
        )

    def make_room(self, count: int) -> bool:
        while self.free < count:
            if not self.evict_one():
                return False
        return True


@dataclass(slots=True)
class Held:
    """A path that both caches pin."""

    tokens: Prefix
    path: list[int]
    naive_path: list[Prefix]
    use: Use


class Twins:
    """The real cache and the naive one, driven by the same operations."""

    def __init__(self, num_frames: int, *, segmented: bool = False, scan_share: float = 1.0) -> None:
        self.time = Clock()
        self.real = HostCache(num_frames, PAGE, STATE_FRAMES, segmented=segmented, scan_share=scan_share, clock=self.time)
        self.naive = NaiveCache(num_frames, self.time, segmented=segmented, scan_share=scan_share)
        self.keys = KeySpace("m", "f", PAGE)
        self.held: list[Held] = []

    def open(self, tokens: Prefix, priority: int = DEFAULT_PRIORITY, seconds: float = math.inf) -> None:
        """Match and pin, as an admission does."""
        path, naive_path = self.real.index.match(self.keys.page_keys(tokens)), self.naive.match(tokens)
        assert [self.real.index.position[f] for f in path] == [len(p) for p in naive_path]
        self.real.index.pin(path)
        self.naive.pin(naive_path)
        self.held.append(Held(tokens, path, naive_path, Use(priority, seconds, len(path))))

    def store(self, at: int, upto: int) -> None:
        """Store missing pages of a held path, as a chunk does."""
        held = self.held[at]
        tokens, path, naive_path = held.tokens, held.path, held.naive_path
        keys = self.keys.page_keys(tokens)[:upto]
        present = self.real.index.match(keys[len(path) :])
        self.real.index.pin(present)
        path += present
        more = self.naive.match(tokens[:upto])[len(naive_path) :]
        self.naive.pin(more)
        naive_path += more
        first, count = len(path), max(0, len(keys) - len(path))
        fits = count if self.naive.make_room(count) else self.naive.free
        with PageReservation(self.real, count) as reservation:
            assert len(reservation.frames) == fits
            parent = path[-1] if path else NONE
            path += reservation.commit(parent, keys[first : first + fits], first, tokens, held.use.priority)
        for _ in range(fits):
            page = tokens[: len(naive_path) + 1]
            self.naive.insert(page, held.use)
            naive_path.append(page)

    def forget(self) -> None:
        """Everything stored is outdated. Who holds a path lets go of it without a claim, as after a reset."""
        self.real.forget()
        self.naive.forget()
        for held in self.held:
            held.use = UNUSED

    def pass_time(self, seconds: float) -> None:
        self.time.now += seconds
        self.real.expire()
        self.naive.expire()

    def abort_store(self, at: int) -> None:
        """Reserve and leave the scope without a commit."""
        path, naive_path = self.held[at].path, self.held[at].naive_path
        want = len(self.held[at].tokens) - len(path)
        with PageReservation(self.real, want):
            self.real.check()
        self.naive.make_room(want)
        assert len(path) == len(naive_path)

    def store_state(self, at: int, depth: int) -> None:
        path, naive_path = self.held[at].path[:depth], self.held[at].naive_path[:depth]
        if not path or self.real.index.states.of[path[-1]] != NONE:
            return
        room = self.naive.make_room(STATE_FRAMES)
        with StateReservation(self.real, path, evict=True) as reservation:
            assert bool(reservation.frames) == room
            if room:
                reservation.commit(StateReason.FORK)
                self.naive.touch_state(naive_path[-1])

    def touch_state(self, at: int) -> None:
        path, naive_path = self.held[at].path, self.held[at].naive_path
        state = self.real.index.states.deepest(path, len(path))
        usable = [p for p in naive_path if p in self.naive.states]
        assert (state == NONE) == (not usable)
        if usable:
            assert self.real.index.position[state] == len(usable[-1])
            self.real.index.states.touch(state)
            self.naive.touch_state(usable[-1])

    def close(self, at: int) -> None:
        held = self.held.pop(at)
        use = held.use if held.use is UNUSED else replace(held.use, num_new=len(held.path) - held.use.num_hit)
        self.real.unpin(held.path, use)
        self.naive.unpin(held.naive_path, use)

    def check(self, deep: bool = True) -> None:
        assert len(self.real.index) == len(self.naive.pages)
        assert len(self.real.index.states) == len(self.naive.states)
        assert self.real.pool.num_free == self.naive.free
        if deep:
            self.real.check()
            index = self.real.index
            ranks = {index.key(page): index.ranks.of[page] for page in index.pages()}
            assert ranks == {self.keys.page_keys(p)[-1]: rank for p, rank in self.naive.ranks.items()}

    def random_step(self, rng: random.Random) -> None:
        if not self.held or (len(self.held) < 4 and rng.random() < 0.3):
            priority = rng.choice(PRIORITIES)
            seconds = rng.choice((math.inf, 3.0, 9.0))
            self.open(tuple(rng.randrange(2) for _ in range(rng.randint(1, 9))), priority, seconds)
            return
        at = rng.randrange(len(self.held))
        length = len(self.held[at].tokens)
        action = rng.random()
        if action < 0.4:
            self.store(at, rng.randint(1, length))
        elif action < 0.55:
            self.store_state(at, rng.randint(1, length))
        elif action < 0.65:
            self.touch_state(at)
        elif action < 0.68:
            self.abort_store(at)
        elif action < 0.73:
            self.pass_time(1.0)
        elif action < 0.735:
            self.forget()
        else:
            self.close(at)


class TwinMachine(RuleBasedStateMachine):
    """Hypothesis looks for the shortest schedule on which the twins differ."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins(14)

    @initialize(segmented=st.booleans(), scan_share=st.sampled_from([0.2, 1.0]))
    def begin(self, segmented: bool, scan_share: float) -> None:
        self.twins = Twins(14, segmented=segmented, scan_share=scan_share)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        priority=st.sampled_from(PRIORITIES),
        seconds=st.sampled_from([math.inf, 1.0, 2.0]),
    )
    def open(self, tokens: list[int], priority: int, seconds: float) -> None:
        if len(self.twins.held) < 4:
            self.twins.open(tuple(tokens), priority, seconds)

    @rule()
    def pass_time(self) -> None:
        self.twins.pass_time(1.0)

    @rule()
    def forget(self) -> None:
        self.twins.forget()

    @precondition(lambda self: self.twins.held)
    @rule(data=st.data(), what=st.sampled_from(["store", "store_state", "touch_state", "abort_store", "close"]))
    def act(self, data: st.DataObject, what: str) -> None:
        at = data.draw(st.integers(0, len(self.twins.held) - 1))
        if what in ("store", "store_state"):
            getattr(self.twins, what)(at, data.draw(st.integers(1, len(self.twins.held[at].tokens))))
        else:
            getattr(self.twins, what)(at)

    @invariant()
    def twins_agree(self) -> None:
        self.twins.check()


TwinMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestTwinMachine = TwinMachine.TestCase


def run_twins(steps: int, seed: int, num_frames: int, every: int, native_map: Make | None = None) -> None:
    """native_map: taken into use after a third of the steps, as a rank does while it serves."""
    rng, twins = random.Random(seed), Twins(num_frames, segmented=seed % 3 == 1, scan_share=0.2 if seed % 4 == 2 else 1.0)
    for step in range(steps):
        if native_map is not None and step == steps // 3:
            twins.real.index.use_map(native_map(num_frames))
        twins.random_step(rng)
        twins.check(deep=step % every == 0)
    while twins.held:
        twins.close(0)
    twins.check()
    assert twins.real.evicted_pages > 0


@pytest.mark.parametrize("num_frames", [7, 30, 90])
def test_ten_thousand_random_operations_agree_with_the_model(num_frames: int) -> None:
    run_twins(3400, num_frames, num_frames, every=50)


@pytest.mark.parametrize("num_frames", [7, 30, 90])
def test_random_operations_agree_with_the_model_when_the_map_becomes_compiled_meanwhile(num_frames: int, native_map: Make) -> None:
    run_twins(2000, num_frames + 1, num_frames, every=50, native_map=native_map)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_million_random_operations_agree_with_the_model(native_map: Make) -> None:
    for seed, num_frames in enumerate((10, 40, 40, 120)):
        run_twins(250_000, seed, num_frames, every=5000, native_map=native_map if seed % 2 else None)


def test_metadata_stays_below_128_bytes_per_page_of_a_full_arena(native_map: Make) -> None:
    num_pages = 10_000
    cache = HostCache(num_pages, 1, 1)
    cache.index.use_map(native_map(num_pages))
    keys = KeySpace("m", "f", 1).page_keys(range(num_pages))
    with PageReservation(cache, num_pages) as reservation:
        cache.unpin(reservation.commit(NONE, keys, 0, range(num_pages)))
    assert cache.metadata_bytes / num_pages <= 105
    path = cache.index.match(keys[:1])
    cache.index.pin(path)
    cache.unpin(path, Use(priority=90, seconds=5.0))  # from here on every page has room for the end of its priority
    assert cache.metadata_bytes / num_pages <= 113


@pytest.mark.parametrize("kind", ["python", "native"])
def test_collector_has_nothing_to_walk_however_many_pages_there_are(kind: str, native_map: Make) -> None:
    num_pages = 50_000
    cache = HostCache(num_pages, 1, 1)
    if kind == "native":
        cache.index.use_map(native_map(num_pages))
    keys = KeySpace("m", "f", 1).page_keys(range(num_pages))
    with PageReservation(cache, num_pages) as reservation:
        cache.unpin(reservation.commit(NONE, keys, 0, range(num_pages)))
    assert len(cache.index) == num_pages
    values = [*vars(cache.index).values(), *vars(cache.index.map).values()]
    walked = [value for value in values if gc.is_tracked(value) and len(gc.get_referents(value)) > 100]
    assert walked == []


def test_deepest_usable_state_is_not_hidden_by_a_deeper_one() -> None:
    cache = HostCache(20, 4, 1)
    keys = KeySpace("m", "f", 4).page_keys(range(20))
    with PageReservation(cache, 5) as reservation:
        path = reservation.commit(NONE, keys, 0, range(20))
    for depth in (2, 5):
        with StateReservation(cache, path[:depth], evict=False) as state:
            state.commit(StateReason.RESEND)
    assert cache.index.position[cache.index.states.deepest(path, 5)] == 20
    assert cache.index.position[cache.index.states.deepest(path, 4)] == 8
    assert cache.index.states.deepest(path, 1) == NONE


def test_state_that_saves_more_than_its_memory_leaves_with_its_page_only() -> None:
    cache = HostCache(8, 1, 3)
    keys = KeySpace("m", "f", 1).page_keys(range(5))
    with PageReservation(cache, 5) as reservation:
        path = reservation.commit(NONE, keys, 0, range(5))
    with StateReservation(cache, path[:3], evict=False) as state:
        state.commit(StateReason.ANCHOR)
    cache.unpin(path)
    assert cache.make_room(2)
    assert len(cache.index.states) == 1
    assert cache.make_room(3)
    assert len(cache.index.states) == 0
    assert len(cache.index) == 2


def test_state_walks_back_to_its_frames_in_order() -> None:
    cache = HostCache(8, 1, 3)
    with PageReservation(cache, 1) as reservation:
        path = reservation.commit(NONE, [b"k" * 32], 0, [7])
    with StateReservation(cache, path, evict=False) as state:
        assert cache.index.states.frames(state.commit(StateReason.TAIL)) == state.frames
