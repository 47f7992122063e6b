"""Restores beside decoding sequences take no more than their share of the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.restore_budget import RestoreBudget

GIGABYTE = 10**9


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(clock: Clock, share: float = 0.05, gb_s: float = 50.0, most_bytes: int = GIGABYTE) -> RestoreBudget:
    return RestoreBudget(most_bytes, share, gb_s, clock)


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=60), st.floats(0.001, 0.05))
def test_continuous_restores_take_their_share_of_the_time_and_no_more(sizes: list[int], step_s: float) -> None:
    clock = Clock()
    budget = make(clock)
    waiting, copied_s, largest_s = list(sizes), 0.0, max(sizes) / (50 * GIGABYTE)
    while waiting:
        budget.begin_step(decoding=True)
        while waiting and budget.allows(waiting[0]):
            budget.spend(waiting[0])
            copied_s += waiting.pop(0) / (50 * GIGABYTE)
        assert copied_s <= 0.05 * clock.now_s + largest_s + 1e-9
        clock.now_s += step_s


def test_a_restore_larger_than_the_share_is_paid_off_before_the_next_one() -> None:
    clock = Clock()
    budget = make(clock)
    budget.begin_step(decoding=True)
    assert budget.allows(89_000_000)
    budget.spend(89_000_000)  # 100,000 tokens: 1.78 ms, a twentieth of the rest of 37.4 ms
    assert not budget.allows(1)
    clock.now_s = 0.0373
    budget.begin_step(decoding=True)
    assert not budget.allows(1)
    clock.now_s = 0.0375
    budget.begin_step(decoding=True)
    assert budget.allows(1)


def test_time_of_the_calls_counts_like_the_time_of_the_copies() -> None:
    clock = Clock()
    budget = make(clock)
    budget.begin_step(decoding=True)
    budget.spend(50_000_000, seconds=0.001)  # 1 ms of copies
    for now, exhausted in ((0.0415, True), (0.0425, False)):
        clock.now_s = now
        budget.begin_step(decoding=True)
        assert budget.exhausted == exhausted == (not budget.allows(1))


def test_looking_up_what_has_to_wait_is_charged_too() -> None:
    clock = Clock()
    budget = make(clock)
    budget.charge(1.0)  # nobody decodes
    assert not budget.exhausted
    budget.begin_step(decoding=True)
    budget.charge(0.001)
    clock.now_s = 0.0209
    budget.begin_step(decoding=True)
    assert budget.exhausted
    clock.now_s = 0.0211
    budget.begin_step(decoding=True)
    assert not budget.exhausted


@pytest.mark.parametrize(("share", "gb_s", "decoding"), [(0.0, 50.0, True), (0.05, 0.0, True), (0.05, 50.0, False)])
def test_only_the_bound_per_step_holds_when_nobody_is_slowed_down(share: float, gb_s: float, decoding: bool) -> None:
    budget = make(Clock(), share, gb_s, most_bytes=100)
    for _ in range(3):
        budget.begin_step(decoding=decoding)
        assert budget.allows(10**9)
        budget.spend(80)
        assert budget.allows(20)
        assert not budget.allows(21)


def test_without_announced_steps_there_is_no_limit() -> None:
    budget = make(Clock(), most_bytes=1)
    budget.spend(100)
    assert budget.allows(100)
