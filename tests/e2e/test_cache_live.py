"""The prefix cache of a live server: recorded sessions, a herd, and a soak, in short. `tests/e2e/cache_live.py` runs them at length.

SOAK_SECONDS: how long the soak lasts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from hicache.policy import restore_cap
from tests.e2e.cache_live import BASE, KEEP, PAGE, TRACES, Live, bodies, generated, herd, leaks, replay, soak
from tests.e2e.conftest import Dix, start, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def live(dix: Dix) -> Iterator[Live]:
    running = start(dix, "cache-live", "--hicache-size-gb", "0.5")
    yield Live(running.url)
    dix("stop", "cache-live", "--grace", "1s")


@pytest.fixture(scope="module")
def tight(dix: Dix) -> Iterator[Live]:
    """An arena for about two sessions, a disk for about eight, and a device cache that preempts."""
    small = ("--hicache-size-gb", "0.012", "--set", "engine.kv_cache_gb=0.006", "--set", "hicache.disk_gb=0.05")
    running = start(dix, "cache-tight", *small)
    yield Live(running.url)
    dix("stop", "cache-tight", "--grace", "1s")


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_recorded_session_hits_97_percent_of_what_an_ideal_cache_would(live: Live, path: object) -> None:
    hits, result = replay(live, list(bodies(live, path)), str(path))  # type: ignore[arg-type]
    assert result.share_of_oracle >= 0.99
    assert hits >= 0.97 * result.oracle_tokens


def test_generated_conversations_hit_what_the_simulator_says(live: Live) -> None:
    hits, result = replay(live, generated(3, live), "generated")
    assert hits == result.hit_tokens >= 0.97 * result.oracle_tokens > 0


def test_herd_on_one_prefix_prefills_it_once(live: Live) -> None:
    found = herd(live, requests=16, prefix_tokens=4000)
    assert found["full"] <= 2
    assert found["share_of_possible"] >= 0.97


def test_rank_restores_what_its_peer_stored_and_answers_the_same(dix: Dix) -> None:
    running = start(dix, "cache-peers", "--dp", "2", "--set", "server.rank_header=true")
    try:
        pair = Live(running.url)
        homes: dict[str, str] = {}
        for number in range(64):
            if len(homes) == 2:
                break
            homes.setdefault(rank_of(pair, f"s{number}", [{"role": "user", "content": f"hi {number}"}])[0], f"s{number}")
        talk = [{"role": "user", "content": pair.text(list(range(2000)))}]
        (first, session), (second, other) = sorted(homes.items())
        assert rank_of(pair, session, talk)[:2] == (first, 0)
        rank, hit, text = rank_of(pair, other, talk)
        assert (rank, hit) == (second, restore_cap(len(pair.ids(talk)), KEEP, PAGE))
        assert rank_of(pair, other, talk, prefix_cache=False)[2] == text
        wait_until("counters", lambda: pair.ranks()[int(second)]["prefix_cache"]["tiers"]["peer"]["hit_tokens_total"] == hit)
    finally:
        dix("stop", "cache-peers", "--grace", "1s")


def rank_of(live: Live, session: str, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int, str]:
    """(rank, hit tokens, answer)."""
    body = {**BASE, "max_tokens": 16, "messages": messages, "session_id": session, **fields}
    answer = live.http.post("/v1/chat/completions", json=body)
    value = answer.json()
    return answer.headers["x-deepinfer-rank"], value["usage"]["prompt_cache_hit_tokens"], value["choices"][0]["message"]["content"]


def test_soak_with_aborts_preemption_and_a_small_arena_leaks_nothing(tight: Live) -> None:
    found = soak(tight, seconds=float(os.environ.get("SOAK_SECONDS", "20")))
    assert found["leaks"] == leaks(tight) == []
    assert found["left"] > 0
    assert found["finished"] > 0
