"""Restore points, state positions and victims as numbers a reader can check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.index import StateReason
from hicache.policy import (
    Victim,
    chunk_states,
    dispensable_intervals,
    prefill_states,
    resend_position,
    restore_cap,
    superseded,
    surplus_fork,
    tail_position,
    victim,
)


@pytest.mark.parametrize(
    ("num_tokens", "resend", "tail"),
    [(1, 0, 0), (129, 0, 128), (267, 0, 256), (268, 128, 256), (1000, 768, 896), (1024, 768, 896), (1035, 768, 1024), (1036, 896, 1024)],
)
def test_positions_of_the_two_states_of_a_prefill(num_tokens: int, resend: int, tail: int) -> None:
    assert resend_position(num_tokens, 140, 128) == resend
    assert tail_position(num_tokens, 128) == tail
    expected = [(resend, StateReason.RESEND)] if resend else []
    assert prefill_states(num_tokens, 140, 128) == expected + ([(tail, StateReason.TAIL)] if tail else [])


@given(st.integers(1, 10_000), st.integers(1, 300), st.sampled_from([16, 32, 128]))
def test_an_identical_prompt_may_always_use_the_first_state_of_its_prefill(num_tokens: int, keep: int, page: int) -> None:
    cap = restore_cap(num_tokens, keep, page)
    assert cap % page == 0
    assert cap <= max(0, num_tokens - keep)
    states = prefill_states(num_tokens, keep, page)
    assert (not states or states[0][1] is StateReason.TAIL) if cap == 0 else states[0] == (cap, StateReason.RESEND)
    assert all(0 < position < num_tokens for position, _ in states)
    assert len({position for position, _ in states}) == len(states)


def test_only_older_resend_and_tail_states_are_superseded() -> None:
    r, t, a = StateReason.RESEND, StateReason.TAIL, StateReason.ANCHOR
    assert superseded([(1, a), (2, r), (3, t), (4, r), (5, t), (6, r)]) == [1, 2]
    assert superseded([(1, r), (2, r), (3, t)]) == []


def test_short_turn_growth_misses_the_tail_state_as_often_as_predicted() -> None:
    """P(only the resend state is usable) = (139 - growth) / 128 for growth in [11, 139]."""
    for growth in (11, 24, 75, 139):
        lengths = range(3000, 3000 + 1280)
        missed = sum(tail_position(n, 128) > restore_cap(n + growth, 140, 128) for n in lengths)
        assert missed / len(lengths) == (139 - growth) / 128


def test_older_entry_goes_first_and_cheap_states_count_as_older() -> None:
    assert victim(10, None, 0, 1664) is Victim.PAGE
    assert victim(None, 5, 100, 1664) is Victim.STATE
    assert victim(None, 5, 1664, 1664) is Victim.NOTHING
    assert victim(None, None, 0, 1664) is Victim.NOTHING
    assert victim(100, 10, 128, 1664) is Victim.STATE
    assert victim(100, 7, 128, 1664) is Victim.PAGE


def test_fork_anchor_and_interval_positions_lie_inside_the_tokens_to_compute() -> None:
    wanted = chunk_states(restored=256, matched=2048, num_tokens=6000, anchor_tokens=1000, interval=2048, keep_tokens=140, page_tokens=128)
    assert wanted == {2048: StateReason.FORK, 4096: StateReason.INTERVAL, 896: StateReason.ANCHOR}
    assert chunk_states(896, 1024, 6000, 1000, 0, 140, 128) == {}
    assert chunk_states(0, 5888, 6000, 0, 0, 140, 128) == {}


def test_least_useful_fork_state_makes_room_for_another() -> None:
    f, r = StateReason.FORK, StateReason.RESEND
    states = [(1000, f), (1100, r), (1200, f), (3000, f)]
    assert surplus_fork(states, 4) is None
    assert surplus_fork(states, 3) == 2


def test_intervals_thin_out_to_doubling_distances_from_the_end() -> None:
    i, r = StateReason.INTERVAL, StateReason.RESEND
    states = [(p * 100, i) for p in range(1, 10)] + [(1000, r)]
    kept = [states[j][0] for j in range(9) if j not in dispensable_intervals(states, 100)]
    assert kept == [200, 600, 800, 900]
