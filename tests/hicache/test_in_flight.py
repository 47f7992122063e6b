"""Who computes which page."""

from __future__ import annotations

from hicache.in_flight import InFlightTable, Producer

KEYS = [bytes([i]) * 32 for i in range(8)]


def test_first_producer_keeps_a_key_and_its_end_clears_them() -> None:
    table = InFlightTable(lambda: 0.0)
    first, second = Producer(1, KEYS[:6], frozenset()), Producer(2, KEYS, frozenset())
    table.register(first, 2)
    table.register(second, 2)
    assert table.find(KEYS, 2) is first
    assert table.find(KEYS, 6) is second
    table.drop(1)
    table.drop(1)
    assert table.find(KEYS, 2) is None
    assert table.find(KEYS, 8) is second
    table.drop(2)
    assert len(table) == 0


def test_pages_that_were_stored_before_the_producer_began_have_no_producer() -> None:
    table = InFlightTable(lambda: 0.0)
    table.register(Producer(1, KEYS, frozenset()), 4)
    assert table.find(KEYS, 2) is None
    assert table.find(KEYS[:4], 4) is None
    assert table.find(KEYS, 4) is not None


def test_reachable_states_are_those_not_passed_yet_and_those_of_the_end() -> None:
    producer = Producer(1, KEYS, frozenset({100, 120}), {40, 80}, done_tokens=50)
    assert [producer.reachable(limit) for limit in (39, 60, 90, 110, 200)] == [0, 0, 80, 100, 120]


def test_shared_pages_end_at_the_first_difference() -> None:
    producer = Producer(1, KEYS, frozenset())
    assert producer.shared_pages([*KEYS[:5], b"other", KEYS[6]], 2) == 5
    assert producer.shared_pages(KEYS[:3], 3) == 3


def test_producer_stalls_when_it_stores_nothing_for_the_timeout() -> None:
    now = [0.0]
    table = InFlightTable(lambda: now[0])
    producer = Producer(1, KEYS, frozenset())
    table.register(producer, 0)
    now[0] = 3.0
    assert table.stalled(producer, 2.0)
    table.progress(1, 64)
    assert not table.stalled(producer, 2.0)
    assert producer.done_tokens == 64
