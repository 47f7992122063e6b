"""Scheduler and prefix cache together for a long simulated time: nothing leaks, nothing is lost, no restored byte is wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.cache_soak import Life, Reading, check_flat, soak


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of copies fail on purpose, and pytest keeps every line of the log: that would be the growth."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_thousands_of_steps_with_restarts_faults_and_eviction_leave_nothing_behind(tmp_path: Path) -> None:
    life = soak(Life(tmp_path, seed=6, haste=10.0), 4_000, check_every=20, readings=4)
    ends = ("restarts", "recovered pages", "resets", "preemptions", "evictions", "checksum errors", "hits", "abort", "kept")
    for happened in (*ends, "misses aborted", "misses tenant", "refused priorities"):
        assert life.seen[happened], f"{happened}: {life.seen}"


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_a_million_steps_leave_nothing_behind_and_memory_stays_flat(tmp_path: Path) -> None:
    life = soak(Life(tmp_path, seed=1), 1_000_000)
    check_flat(life.readings)
    assert life.seen["restarts"] > 200


@pytest.mark.parametrize("name", ["objects", "blocks", "rss_bytes"])
def test_growth_is_seen(name: str) -> None:
    flat = [Reading(step, 10_000, 100_000, 2 * 10**8) for step in range(20)]
    check_flat(flat)
    grown = [replace(reading, **{name: int(getattr(reading, name) * (1 + reading.step / 50))}) for reading in flat]
    with pytest.raises(AssertionError, match=name):
        check_flat(grown)
