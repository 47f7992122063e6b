"""Priorities of stored prefixes: who leaves first, how long a raised one lasts, and how much of the arena they may take."""

from __future__ import annotations

import math

import pytest

from hicache.host_cache import HostCache
from hicache.host_pool import Owner
from hicache.index import NONE, StateReason
from hicache.keys import KeySpace
from hicache.priority import MOST_RAISED_SHARE, Use
from hicache.ranking import DEFAULT_PRIORITY
from hicache.reservation import PageReservation, StateReservation

KEYS = KeySpace("m", "f", 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> HostCache:
    return HostCache(20, 1, 2, clock=clock)


def store(cache: HostCache, tokens: list[int], priority: int = DEFAULT_PRIORITY, seconds: float = math.inf, *, state: bool = False) -> None:
    keys = KEYS.page_keys(tokens)
    path = cache.index.match(keys)
    hit = len(path)
    cache.index.pin(path)
    with PageReservation(cache, len(keys) - hit) as reservation:
        path = [*path, *reservation.commit(path[-1] if path else NONE, keys[hit:], hit, tokens, priority)]
    if state:
        with StateReservation(cache, path, evict=True) as states:
            states.commit(StateReason.RESEND)
    cache.unpin(path, Use(priority, seconds, hit, len(path) - hit))
    cache.check()


def stored(cache: HostCache, tokens: list[int]) -> int:
    return len(cache.index.match(KEYS.page_keys(tokens)))


def evict(cache: HostCache, count: int) -> None:
    assert cache.make_room(cache.pool.num_free + count)
    cache.check()


def test_lower_priority_leaves_first_however_recent_it_is(cache: HostCache) -> None:
    store(cache, [1, 2], 80)
    store(cache, [3, 4])
    store(cache, [5, 6], 0)
    evict(cache, 2)
    assert [stored(cache, p) for p in ([1, 2], [3, 4], [5, 6])] == [2, 2, 0]
    evict(cache, 2)
    assert [stored(cache, p) for p in ([1, 2], [3, 4])] == [2, 0]
    evict(cache, 2)
    assert stored(cache, [1, 2]) == 0


def test_raised_continuation_raises_its_ancestors_and_not_their_other_children(cache: HostCache) -> None:
    store(cache, [1, 2, 3])
    store(cache, [1, 2, 9], 90)
    evict(cache, 1)
    assert (stored(cache, [1, 2, 3]), stored(cache, [1, 2, 9])) == (2, 3)
    index = cache.index
    assert [index.ranks.priority(page) for page in index.match(KEYS.page_keys([1, 2, 9]))] == [90, 90, 90]


def test_hit_never_lowers_a_priority_and_a_higher_one_raises_it(cache: HostCache) -> None:
    store(cache, [1, 2], 50)
    store(cache, [1, 2], 10)
    page = cache.index.match(KEYS.page_keys([1, 2]))[-1]
    assert cache.index.ranks.priority(page) == 50
    store(cache, [1, 2], 70)
    assert cache.index.ranks.priority(page) == 70


def test_hit_of_an_ordinary_request_lifts_what_was_to_leave_first(cache: HostCache) -> None:
    store(cache, [1], 0)
    store(cache, [2], 0)
    store(cache, [1])
    evict(cache, 1)
    assert (stored(cache, [1]), stored(cache, [2])) == (1, 0)


def test_raised_priority_ends_with_its_time_and_the_latest_end_counts(cache: HostCache, clock: Clock) -> None:
    store(cache, [1, 2], 80, seconds=10)
    store(cache, [1, 5], 60, seconds=20)
    index = cache.index
    root, first, second = index.find(KEYS.page_keys([1])[0]), *(index.match(KEYS.page_keys(p))[-1] for p in ([1, 2], [1, 5]))
    clock.now = 10.0
    cache.expire()
    assert [index.ranks.priority(p) for p in (root, first, second)] == [80, DEFAULT_PRIORITY, 60]
    clock.now = 20.0
    cache.expire()
    assert [index.ranks.priority(p) for p in (root, first, second)] == [DEFAULT_PRIORITY] * 3
    cache.check()


def test_priority_without_an_end_outlasts_one_with_an_end(cache: HostCache, clock: Clock) -> None:
    store(cache, [1], 80)
    store(cache, [1], 90, seconds=1)
    clock.now = 100.0
    cache.expire()
    assert cache.index.ranks.priority(cache.index.match(KEYS.page_keys([1]))[0]) == 90


def test_end_of_a_priority_does_not_touch_what_uses_its_frames_now(cache: HostCache, clock: Clock) -> None:
    store(cache, [1, 2], 80, seconds=10)
    evict(cache, 2)
    store(cache, [3, 4], 70)
    clock.now = 10.0
    cache.expire()
    assert [cache.index.ranks.priority(p) for p in cache.index.match(KEYS.page_keys([3, 4]))] == [70, 70]
    cache.check()


def test_equal_ends_lower_the_deeper_pages_first(cache: HostCache, clock: Clock) -> None:
    store(cache, [1, 2], 80, seconds=10)
    store(cache, [1, 2, 3], 80, seconds=10)
    clock.now = 10.0
    cache.expire()
    cache.check()
    evict(cache, 1)
    assert stored(cache, [1, 2, 3]) == 2


@pytest.mark.parametrize("bound", ["_MOST_LEASES", "_MOST_FRAMES"])
def test_too_many_ends_let_the_soonest_end_now(cache: HostCache, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.priority." + bound, 2 if bound == "_MOST_LEASES" else 5)
    for number, seconds in enumerate((30, 10, 20)):
        store(cache, [number, 7], 80, seconds=seconds)
    index = cache.index
    ranks = [index.ranks.priority(index.match(KEYS.page_keys([number, 7]))[-1]) for number in range(3)]
    assert ranks == [80, DEFAULT_PRIORITY, 80]


def test_priorities_that_end_together_are_lowered_over_several_steps(
    cache: HostCache, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.priority._MOST_AT_ONCE", 3)
    for number in range(5):
        store(cache, [number, 7], 80, seconds=10)
    clock.now = 11.0
    raised = []
    for _ in range(4):
        cache.expire()
        cache.check()
        raised.append(cache.index.ranks.num_raised)
    assert raised == [6, 2, 0, 0]


@pytest.mark.parametrize("bound", ["_MOST_LEASES", "_MOST_FRAMES"])
def test_priority_that_comes_when_ends_are_too_many_has_an_end_as_well(
    cache: HostCache, clock: Clock, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.priority." + bound, 2 if bound == "_MOST_LEASES" else 5)
    for number, seconds in enumerate((30, 20, 10)):
        store(cache, [number, 7], 80, seconds=seconds)
    clock.now = 30.0
    cache.expire()
    assert cache.index.ranks.num_raised == 0


def test_raised_pages_take_at_most_their_share_of_the_arena(cache: HostCache) -> None:
    most = int(MOST_RAISED_SHARE * 20)
    store(cache, list(range(most)), 90)
    assert cache.index.ranks.num_raised == most
    store(cache, [100], 90)
    assert (cache.index.ranks.num_raised, cache.refused_priorities) == (most, 1)
    store(cache, list(range(most)), 95)  # what is raised already may be raised further
    assert cache.refused_priorities == 1


def test_state_of_lower_priority_leaves_before_pages_of_a_higher_one(cache: HostCache) -> None:
    store(cache, [1], 10, state=True)
    store(cache, [2], state=True)
    path = cache.index.match(KEYS.page_keys([1]))
    cache.index.pin(path)  # its page cannot leave, so that the state stands against the other page
    assert cache.make_room(cache.pool.num_free + 1)
    assert (len(cache.index.states), stored(cache, [2])) == (1, 1)
    cache.unpin(path)


def test_after_a_reset_old_prefixes_leave_first_whatever_their_priority(cache: HostCache, clock: Clock) -> None:
    store(cache, [1, 2], 100, seconds=5)
    store(cache, [3])
    cache.forget()
    store(cache, [4, 5], 0)
    evict(cache, 3)
    assert [stored(cache, p) for p in ([1, 2], [3], [4, 5])] == [0, 0, 2]
    clock.now = 5.0
    cache.expire()
    cache.check()


def test_inherited_priorities_hold_for_an_hour_and_ancestors_keep_up(clock: Clock) -> None:
    ranks = bytearray([71, 120, 0, 255, 0])  # as a killed rank left them, the root's not yet raised
    cache = HostCache(5, 1, 1, ranks=ranks, clock=clock)
    keys = KEYS.page_keys([7, 8])
    cache.index.adopt(0, keys[0], NONE, 1, 7, 7)
    cache.index.adopt(1, keys[1], 0, 2, 8, 8)
    cache.pool.hold([0, 1], Owner.PAGE)
    cache.inherit([0, 1])
    cache.check()
    assert [cache.index.ranks.priority(page) for page in (0, 1)] == [60, 60]
    clock.now = 3600.0
    cache.expire()
    assert [cache.index.ranks.priority(page) for page in (0, 1)] == [DEFAULT_PRIORITY] * 2


def test_pages_of_a_large_prompt_leave_before_older_ones(clock: Clock) -> None:
    cache = HostCache(20, 1, 2, scan_share=0.25, clock=clock)
    store(cache, [1, 2, 3])
    store(cache, [1, *range(10, 16)])
    evict(cache, 6)
    assert (stored(cache, [1, 2, 3]), stored(cache, [1, *range(10, 16)])) == (3, 1)


def test_visited_pages_are_protected_until_others_need_the_room() -> None:
    cache = HostCache(10, 1, 2, segmented=True)
    store(cache, [1, 2])
    store(cache, [1, 2])
    store(cache, [3, 4])
    evict(cache, 2)
    assert (stored(cache, [1, 2]), stored(cache, [3, 4])) == (2, 0)
    for token in range(10, 18):
        store(cache, [token])
        store(cache, [token])
    assert cache.index.ranks.num_protected == 8
    evict(cache, 2)
    assert stored(cache, [1, 2]) == 0


def test_visit_of_a_lower_priority_protects_too() -> None:
    cache = HostCache(10, 1, 2, segmented=True)
    store(cache, [1])
    store(cache, [1], 0)
    store(cache, [2])
    evict(cache, 1)
    assert (stored(cache, [1]), stored(cache, [2])) == (1, 0)


def test_a_large_arena_evicts_a_few_pages_ahead_and_a_small_one_none() -> None:
    for num_frames, ahead in ((1_000, 1), (8_192, 8)):
        cache = HostCache(num_frames, 1, 2)
        store(cache, list(range(num_frames)))
        assert cache.make_room(1)
        assert cache.pool.num_free == ahead
