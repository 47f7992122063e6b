"""Prefixes that were asked to stay: they outlive pressure until their time is over, within their share, and leave nothing behind."""

from __future__ import annotations

import math

import pytest

from engine.cache_contract import NoPrefixCache
from engine.cache_pins import MOST_SHARE
from engine.errors import ConfigError
from engine.prefix_cache import PrefixCache
from hicache.config import HiCacheConfig
from tests.engine.test_prefix_cache import FRAME, KEEP, assert_idle, run
from tests.engine.test_prefix_cache_states import Clock
from tests.hicache.fake_kv import FakeKV

FRAMES = 200
WANTED = list(range(5000, 5040))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> PrefixCache:
    config = HiCacheConfig(min_restore_tokens=1, audit="full")
    return PrefixCache(config, FakeKV(num_blocks=400), "model", KEEP, num_bytes=FRAMES * FRAME, clock=clock)  # type: ignore[arg-type]


def press(cache: PrefixCache) -> None:
    """Fill the arena with prompts that share nothing."""
    for number in range(12):
        run(cache, [10_000 * (number + 2) + i for i in range(200)])
    assert cache.cache.evicted_pages > 0


def test_pinned_prefix_hits_after_pressure_that_evicts_all_others(cache: PrefixCache) -> None:
    other = list(range(7000, 7040))
    run(cache, WANTED)
    run(cache, other)
    best = run(cache, WANTED).cached_tokens or 0
    found = cache.keep(WANTED, "", 60.0)
    assert found["pinned_tokens"] == 40
    assert found["restorable_tokens"] >= best > 0  # its last state serves prompts that go on from here
    press(cache)
    assert run(cache, WANTED).cached_tokens == best
    assert run(cache, other).cached_tokens == 0
    cache.cache.check()


def test_pin_ends_with_its_time_and_with_a_time_of_zero(cache: PrefixCache, clock: Clock) -> None:
    run(cache, WANTED)
    for let_go in ("time", "zero"):
        cache.keep(WANTED, "", 60.0)
        cache.keep(WANTED, "", 30.0)  # the newest word counts
        assert cache.stats()["kept_prefixes"] == 1
        clock.now += 29.0
        cache.begin_step()
        assert cache.stats()["kept_frames"] > 0
        if let_go == "time":
            clock.now += 2.0
            cache.begin_step()
        else:
            assert cache.keep(WANTED, "", 0.0)["pinned_tokens"] == 0
        assert (cache.stats()["kept_prefixes"], cache.stats()["kept_frames"]) == (0, 0)
        assert_idle(cache)
    press(cache)
    assert run(cache, WANTED).cached_tokens == 0


def test_refusal_leaves_an_earlier_pin_of_the_same_prompt_as_it_is(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    run(cache, WANTED)
    cache.keep(WANTED, "", 60.0)
    frames = cache.stats()["kept_frames"]
    monkeypatch.setattr("engine.cache_pins.MOST_SHARE", 0.0)
    with pytest.raises(ConfigError):
        cache.keep(WANTED, "", 60.0)
    assert (cache.stats()["kept_prefixes"], cache.stats()["kept_frames"]) == (1, frames)
    cache.keep(WANTED, "", 0.0)
    assert_idle(cache)


def test_pin_is_found_again_when_more_of_its_prompt_is_stored(cache: PrefixCache) -> None:
    run(cache, WANTED[:20])
    assert cache.keep(WANTED, "", math.inf)["pinned_tokens"] == 20
    run(cache, WANTED)
    assert cache.keep(WANTED, "", math.inf)["pinned_tokens"] == 40
    cache.keep(WANTED, "", 0.0)
    assert cache.stats()["kept_frames"] == 0
    assert_idle(cache)


def test_prefixes_share_what_they_have_in_common_and_the_share_of_the_arena_is_bounded(cache: PrefixCache) -> None:
    most, kept = int(MOST_SHARE * FRAMES), [0]

    def keep_one_more() -> None:
        tokens = [*WANTED[:32], *(20_000 + 100 * len(kept) + i for i in range(8))]
        run(cache, tokens)
        cache.keep(tokens, "", math.inf)
        kept.append(cache.stats()["kept_frames"])

    def keep_too_many() -> None:
        for _ in range(50):
            keep_one_more()

    with pytest.raises(ConfigError) as refused:
        keep_too_many()
    assert str(most) in refused.value.hint
    assert len(kept) > 2
    assert kept[2] < 2 * kept[1]  # the second one adds its own end only
    assert kept[-1] <= most
    cache.cache.check()
    cache.reset()
    assert cache.stats()["kept_frames"] == 0
    assert_idle(cache)


def test_other_tenants_and_unknown_prompts_pin_nothing(cache: PrefixCache) -> None:
    run(cache, WANTED)
    for tokens, salt in ((WANTED, "other"), (list(range(40)), ""), ([], "")):
        assert cache.keep(tokens, salt, 60.0) == {"pinned_tokens": 0, "restorable_tokens": 0}
    assert cache.stats()["kept_prefixes"] == 0


@pytest.mark.parametrize("target", ["page", "state"])
def test_damage_ends_a_pin_so_that_the_prefix_is_stored_anew(cache: PrefixCache, target: str) -> None:
    run(cache, WANTED)
    best = run(cache, WANTED).cached_tokens or 0
    cache.keep(WANTED, "", math.inf)
    index = cache.cache.index
    cap = best // cache.cache.page_tokens
    path = index.match(cache._keys.page_keys(WANTED))
    frame = path[0] if target == "page" else index.states.of[path[cap - 1]]
    cache.mover.arena.rows[frame] += 1
    assert run(cache, WANTED).cached_tokens == 0
    assert cache.counters.checksum_errors == 1
    assert cache.stats()["kept_prefixes"] == 0
    assert run(cache, WANTED).cached_tokens == best
    assert_idle(cache)


def test_without_a_cache_nothing_can_be_pinned() -> None:
    with pytest.raises(ConfigError, match="no host cache"):
        NoPrefixCache().keep(WANTED, "", 1.0)
