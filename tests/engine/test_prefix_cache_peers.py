"""Ranks of one host restore from each other's arenas: the right bytes or nothing, and no frame changes while a peer reads it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.cache_contract import PlanKind
from engine.prefix_cache import PrefixCache
from engine.request import Sequence
from hicache.config import HiCacheConfig
from hicache.host_pool import Owner
from hicache.segment import CacheHome
from tests.engine.test_prefix_cache import FRAME, KEEP, admit, assert_idle, device, next_prompt, prefill, run
from tests.hicache.fake_kv import FakeKV, make_sequence

PROMPT = [i % 50 for i in range(41)]


def ranks(directory: Path, num_frames: int = 200, count: int = 2, **knobs: object) -> list[PrefixCache]:
    config = HiCacheConfig(min_restore_tokens=1, **{"audit": "full", **knobs})  # type: ignore[arg-type]
    homes = [CacheHome(directory, "dix-test", rank, count, b"s" * 32) for rank in range(count)]
    return [PrefixCache(config, FakeKV(), "model", KEEP, num_bytes=num_frames * FRAME, home=home) for home in homes]  # type: ignore[arg-type]


def store(cache: PrefixCache, *prompts: list[int]) -> None:
    for prompt in prompts:
        cache.begin_step()
        run(cache, prompt)


def leases(owner: PrefixCache) -> int:
    segment = owner.mover.segment
    assert segment is not None
    layout = segment.layout
    rows = [layout.lease_row_at(rank) + 16 for rank in range(layout.ranks)]
    return sum(sum(segment.mapping[row : row + layout.num_frames]) for row in rows)


def test_prefix_of_a_peer_hits_with_its_bytes_and_is_then_held_here_too(tmp_path: Path) -> None:
    here, there = ranks(tmp_path)
    store(there, PROMPT)
    assert run(here, PROMPT).cached_tokens == 32
    tiers = here.stats()["tiers"]
    assert (tiers["peer"]["hit_tokens_total"], tiers["host"]["hit_tokens_total"]) == (32, 0)
    assert here.stats()["state_hits_total"] == {"peer": 1}
    assert run(here, PROMPT).cached_tokens == 32
    assert here.stats()["tiers"]["host"]["hit_tokens_total"] == 32
    assert leases(there) == 0
    for cache in (here, there):
        assert_idle(cache)


def test_longer_prefix_of_a_peer_wins_over_a_shorter_one_here(tmp_path: Path) -> None:
    here, there = ranks(tmp_path)
    store(here, PROMPT[:21])
    store(there, PROMPT)
    assert run(here, PROMPT).cached_tokens == 32
    assert run(here, [*PROMPT[:21], 7, 7, 7, 7, 7, 7, 7]).cached_tokens is not None
    assert_idle(here)


def test_salted_prefix_of_another_tenant_is_not_found(tmp_path: Path) -> None:
    here, there = ranks(tmp_path)
    run(there, PROMPT, salt="a")
    assert run(here, PROMPT, salt="b").cached_tokens == 0
    assert run(here, PROMPT, salt="a").cached_tokens == 32


def test_what_a_reset_forgot_is_not_found_at_a_peer(tmp_path: Path) -> None:
    here, there = ranks(tmp_path)
    store(there, PROMPT)
    for cache in (here, there):
        cache.reset()
    assert run(here, PROMPT).cached_tokens == 0


def test_owner_does_not_rewrite_frames_that_a_peer_is_reading(tmp_path: Path) -> None:
    here, there = ranks(tmp_path, num_frames=40)
    store(there, PROMPT)
    seq = make_sequence(10**6, PROMPT)
    plan = here.plan(seq)
    assert plan.restore_tokens == 32
    store(there, *([500 + 41 * n + i for i in range(41)] for n in range(12)))
    assert not there.cache.index.match(there._keys.page_keys(PROMPT))
    assert there.cache.pool.count(Owner.LEASED) > 0
    segment = there.mover.segment
    assert segment is not None
    frames = plan.match.peer.pages  # type: ignore[union-attr]
    for block, frame in enumerate(frames):
        expected = device(there).page_bytes(PROMPT[: 4 * (block + 1)])
        assert there.mover.arena.rows[frame, : len(expected)].equal(expected)
    here.restore(seq, plan)  # its record is gone, so it is computed anew
    assert seq.num_computed == 0
    prefill(here, seq)
    here.finish(seq)
    there.begin_step()
    assert there.cache.pool.count(Owner.LEASED) == 0
    for cache in (here, there):
        assert_idle(cache)


def test_dead_readers_leases_do_not_keep_frames(tmp_path: Path) -> None:
    here, there = ranks(tmp_path, num_frames=40)
    store(there, PROMPT)
    assert here.plan(make_sequence(10**6, PROMPT)).restore_tokens == 32
    segment = there.mover.segment
    assert segment is not None
    row = segment.layout.lease_row_at(0)
    segment.mapping[row + 8 : row + 16] = (1).to_bytes(8, "little")  # a pid that another process has by now
    store(there, *([500 + 41 * n + i for i in range(41)] for n in range(12)))
    assert there.cache.pool.count(Owner.LEASED) == 0


def test_abandoned_or_finished_plan_ends_its_lease(tmp_path: Path) -> None:
    here, there = ranks(tmp_path)
    store(there, PROMPT)
    first, second = make_sequence(10**6, PROMPT), make_sequence(10**6 + 1, PROMPT)
    plan = here.plan(first)
    assert leases(there) > 0
    here.abandon(plan)
    here.plan(second)
    here.finish(second)
    assert leases(there) == 0


def test_damaged_bytes_of_a_peer_are_noticed_and_computed_anew(tmp_path: Path) -> None:
    here, there = ranks(tmp_path)
    store(there, PROMPT)
    there.mover.arena.rows[there.cache.index.match(there._keys.page_keys(PROMPT))[2], 5] ^= 1
    assert run(here, PROMPT).cached_tokens == 0
    assert here.stats()["checksum_errors_total"] == 1
    assert leases(there) == 0


def test_sharing_can_be_turned_off_and_needs_equal_shapes(tmp_path: Path) -> None:
    here, there = ranks(tmp_path, share=False)
    store(there, PROMPT)
    assert run(here, PROMPT).cached_tokens == 0
    (tmp_path / "other").mkdir()
    mixed = [ranks(tmp_path / "other", num_frames=n)[rank] for rank, n in ((0, 100), (1, 120))]
    store(mixed[1], PROMPT)
    assert run(mixed[0], PROMPT).cached_tokens == 0


@pytest.mark.parametrize("num_frames", [40, 120])
@pytest.mark.parametrize("seed", range(4))
def test_random_sessions_on_three_ranks_restore_only_right_bytes_and_leak_nothing(tmp_path: Path, num_frames: int, seed: int) -> None:
    rng = random.Random(seed)
    caches = ranks(tmp_path, num_frames=num_frames, count=3, herd_min_tokens=0)
    prompts: list[list[int]] = []
    waiting: list[tuple[PrefixCache, Sequence, object]] = []
    peer_hits = 0
    for number in range(150):
        cache = rng.choice(caches)
        cache.begin_step()
        prompts.append(next_prompt(rng, prompts[-8:]))
        seq = make_sequence(10**7 + number, prompts[-1])
        if rng.random() < 0.2:  # a plan that waits for admission while other ranks go on
            waiting.append((cache, seq, cache.plan(seq)))
        else:
            plan = admit(cache, seq)
            peer_hits += plan.reason == "peer" and plan.kind is PlanKind.HIT
            prefill(cache, seq, stop_after=rng.choice((None, None, 1)))
            cache.finish(seq)
        if len(waiting) > 2:
            cache, seq, plan = waiting.pop(0)  # type: ignore[assignment]
            cache.abandon(plan)  # type: ignore[arg-type]
            cache.finish(seq)
    for cache, seq, plan in waiting:
        cache.abandon(plan)  # type: ignore[arg-type]
        cache.finish(seq)
    assert peer_hits > 3
    for cache in caches:
        cache.begin_step()
        assert leases(cache) == 0
        assert cache.stats()["checksum_errors_total"] == 0
        assert cache.cache.pool.count(Owner.LEASED) == 0
        assert_idle(cache)
