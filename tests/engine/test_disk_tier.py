"""Prefixes on disk: they outlive every stop, fill the arena again, and whatever was damaged is computed anew."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hicache.disk
from engine.cache_contract import PlanKind
from engine.disk_tier import DiskTier
from engine.errors import ConfigError
from engine.prefix_cache import PrefixCache
from engine.request import Sequence
from hicache.config import HiCacheConfig
from hicache.errors import MachineError
from hicache.host_pool import Owner
from hicache.ranking import DEFAULT_PRIORITY
from hicache.segment import CacheHome
from tests.engine.test_prefix_cache import FRAME, KEEP, _ids, assert_idle, check_restored, next_prompt, prefill
from tests.hicache.fake_kv import FakeKV, make_sequence

PROMPTS = [[(begin * 977 + 7 * i) % 50_000 for i in range(61)] for begin in range(1, 9)]
HIT = 52  # of a prompt of 61 tokens


def start(directory: Path, num_frames: int = 600, disk_bytes: int = 2**24, **knobs: object) -> PrefixCache:
    settings = {"audit": "full", "segment": "private", "disk_min_tokens": 4, "min_restore_tokens": 1, "disk_exit_seconds": 20.0, **knobs}
    config = HiCacheConfig(disk_gb=disk_bytes / 2**30, **settings)  # type: ignore[arg-type]
    home = CacheHome(directory, "dix-test", 0, 1, b"s" * 32, str(directory))
    return PrefixCache(config, FakeKV(), "model", KEEP, num_bytes=num_frames * FRAME, home=home)  # type: ignore[arg-type]


def tier(cache: PrefixCache) -> DiskTier:
    assert cache.sources.disk is not None
    return cache.sources.disk


def serve(cache: PrefixCache, tokens: list[int], priority: int = DEFAULT_PRIORITY) -> Sequence:
    """A whole prefill, waiting for the disk as the scheduler does."""
    seq = make_sequence(next(_ids), tokens, priority=priority)
    deadline = time.monotonic() + 10
    while (plan := cache.plan(seq)).kind is PlanKind.HOLD:
        assert time.monotonic() < deadline, plan
        cache.abandon(plan)
        time.sleep(0.001)
        cache.begin_step()
    cache.mover._kv.blocks.fill_(0xEE)
    cache.restore(seq, plan)
    seq.checkpoints = cache.checkpoints(seq)
    check_restored(cache, seq, seq.num_computed)
    prefill(cache, seq)
    cache.finish(seq)
    cache.begin_step()
    return seq


def spill_all(cache: PrefixCache) -> None:
    disk = tier(cache)
    while True:
        disk.settle(cache._keys.epoch)
        disk._rest_until_s = 0.0
        if not disk._spill_next():
            return


def figures(cache: PrefixCache) -> dict[str, object]:
    stats = cache.stats()
    return {**stats["disk"], "errors_total": stats["disk_errors_total"]}


def test_restarted_server_hits_what_it_had_written_and_says_where_it_came_from(tmp_path: Path) -> None:
    first = start(tmp_path)
    assert [serve(first, prompt).cached_tokens for prompt in PROMPTS] == [0] * len(PROMPTS)
    first.close()
    first.close()
    second = start(tmp_path)
    assert figures(second)["pages"] == 15 * len(PROMPTS)
    assert [serve(second, prompt).cached_tokens for prompt in PROMPTS] == [HIT] * len(PROMPTS)
    stats = second.stats()
    assert stats["tiers"]["disk"]["hit_tokens_total"] == stats["hit_tokens_total"] == HIT * len(PROMPTS)
    assert stats["tiers"]["host"]["hit_tokens_total"] == 0
    assert [serve(second, prompt).cached_tokens for prompt in PROMPTS] == [HIT] * len(PROMPTS)
    assert second.stats()["tiers"]["host"]["hit_tokens_total"] == HIT * len(PROMPTS)
    tier(second).settle(second._keys.epoch)
    assert_idle(second)
    second.close()


def test_what_the_arena_evicted_comes_back_from_disk(tmp_path: Path) -> None:
    cache = start(tmp_path, num_frames=50)
    for prompt in PROMPTS:
        serve(cache, prompt)
        spill_all(cache)
    assert cache.stats()["evictions_total"] > 0
    assert [serve(cache, prompt).cached_tokens for prompt in PROMPTS] == [HIT] * len(PROMPTS)
    assert cache.stats()["checksum_errors_total"] == 0
    tier(cache).settle(cache._keys.epoch)
    assert_idle(cache)
    cache.close()


def test_random_sessions_under_pressure_restore_exactly_what_was_computed(tmp_path: Path) -> None:
    rng, cache = random.Random(3), start(tmp_path, num_frames=60, disk_bytes=80 * 2 * FRAME)
    history: list[list[int]] = []
    for _ in range(150):
        tokens = next_prompt(rng, history)
        serve(cache, tokens)
        tier(cache)._rest_until_s = 0.0
        history = [*history[-15:], tokens]
    disk = figures(cache)
    assert disk["loaded_pages_total"]
    assert disk["bytes"] <= 80 * 2 * FRAME  # type: ignore[operator]
    assert cache.stats()["checksum_errors_total"] == 0
    tier(cache).settle(cache._keys.epoch)
    cache.begin_step()
    tier(cache).settle(cache._keys.epoch)
    assert_idle(cache)
    cache.close()


def test_pages_from_disk_lift_the_low_priority_of_those_above_them(tmp_path: Path) -> None:
    """Else the arena's next victim would be a page that leads to others."""
    cache = start(tmp_path, num_frames=150)
    serve(cache, PROMPTS[0], priority=0)
    spill_all(cache)
    assert cache.cache.make_room(cache.cache.pool.num_free + 12)
    assert 0 < len(cache.cache.index) < 13
    assert serve(cache, PROMPTS[0], priority=0).cached_tokens == HIT
    assert figures(cache)["loaded_pages_total"]
    cache.cache.check()
    assert cache.cache.make_room(150)
    assert_idle(cache)
    cache.close()


def test_frames_that_are_being_written_to_disk_are_not_used_again_before_they_have_arrived(tmp_path: Path) -> None:
    cache = start(tmp_path, num_frames=40)
    serve(cache, PROMPTS[0])
    disk = tier(cache)
    disk.settle(cache._keys.epoch)
    disk.store.forget(list(disk.store.pages))
    disk._rest_until_s = 0.0
    assert disk._spill_next()
    spill = disk._spill
    assert spill is not None
    spill.result.result()
    pool = cache.cache.pool
    cache.cache.make_room(36)  # evicts pages of the only prompt
    leased = pool.count(Owner.LEASED)
    assert leased > 0
    assert not spill.frames & set(pool.take(pool.num_free))
    disk.step(cache._keys.epoch)
    pool.collect_leased()
    assert pool.count(Owner.LEASED) == 0


def test_order_of_eviction_is_not_changed_by_writing(tmp_path: Path) -> None:
    cache = start(tmp_path)
    for prompt in PROMPTS:
        serve(cache, prompt)
    order = list(cache.cache.index.by_recency()), list(cache.cache.index.states.by_recency())
    spill_all(cache)
    assert figures(cache)["states"] == len(order[1])
    assert (list(cache.cache.index.by_recency()), list(cache.cache.index.states.by_recency())) == order
    cache.close()


def test_the_most_valuable_state_is_written_first(tmp_path: Path) -> None:
    cache = start(tmp_path)
    tier(cache)._rest_until_s = float("inf")
    for prompt in PROMPTS:
        serve(cache, prompt)
    for _ in range(5):
        serve(cache, PROMPTS[2])
    tier(cache)._rest_until_s = 0.0
    assert tier(cache)._spill_next()
    tier(cache).settle(cache._keys.epoch)
    assert set(tier(cache).store.pages) <= set(cache._keys.page_keys(PROMPTS[2]))
    cache.close()


def test_reset_also_forgets_what_is_on_disk_for_every_later_process(tmp_path: Path) -> None:
    first = start(tmp_path)
    serve(first, PROMPTS[0])
    spill_all(first)
    first.reset()
    assert serve(first, PROMPTS[0]).cached_tokens == 0
    first.close()
    second = start(tmp_path)
    assert second._keys.epoch == 1
    assert serve(second, PROMPTS[0]).cached_tokens == HIT  # stored after the reset
    second.reset()
    second.close()
    third = start(tmp_path)
    assert serve(third, PROMPTS[0]).cached_tokens == 0
    third.close()


def test_without_a_manifest_nothing_old_is_believed(tmp_path: Path) -> None:
    first = start(tmp_path)
    serve(first, PROMPTS[0])
    first.close()
    (tmp_path / "pages" / "r0" / "manifest.json").write_text("{")
    second = start(tmp_path)
    assert figures(second)["pages"] == 0
    assert serve(second, PROMPTS[0]).cached_tokens == 0
    second.close()


def test_damaged_page_on_disk_is_computed_anew_and_the_rest_of_the_prefix_still_comes(tmp_path: Path) -> None:
    first = start(tmp_path)
    serve(first, PROMPTS[0])
    keys = first._keys.page_keys(PROMPTS[0])
    spill_all(first)
    slot = tier(first).store.pages[keys[9]]
    first.close()
    path = tmp_path / "pages" / "r0" / f"{slot.number:08}.pages"
    raw = bytearray(path.read_bytes())
    raw[slot.at + 4096 + 10] ^= 4
    path.write_bytes(raw)
    second = start(tmp_path)
    assert serve(second, PROMPTS[0]).cached_tokens == 0  # no state lies before the damage
    assert figures(second)["errors_total"]["checksum"] == 1  # type: ignore[index]
    assert figures(second)["loaded_pages_total"] == 9
    assert serve(second, PROMPTS[0]).cached_tokens == HIT
    tier(second).settle(second._keys.epoch)
    assert_idle(second)
    second.close()


def test_full_disk_ends_the_writing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = start(tmp_path)
    serve(cache, PROMPTS[0])
    spill_all(cache)
    written = figures(cache)["pages"]
    real = os.pwritev

    def full(descriptor: int, parts: list[memoryview], at: int) -> int:
        if at > 3 * FRAME:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, parts, at)

    monkeypatch.setattr(os, "pwritev", full)
    for prompt in PROMPTS[1:4]:
        serve(cache, prompt)
        spill_all(cache)
    assert figures(cache)["full"] == 1
    assert figures(cache)["errors_total"]["write"] == 1  # type: ignore[index]
    assert [serve(cache, prompt).cached_tokens for prompt in PROMPTS[:4]] == [HIT] * 4
    assert_idle(cache)
    monkeypatch.undo()
    cache.close()
    again = start(tmp_path)
    assert figures(again)["pages"] == written
    assert serve(again, PROMPTS[0]).cached_tokens == HIT
    again.close()


def test_damage_in_memory_does_not_reach_the_disk(tmp_path: Path) -> None:
    cache = start(tmp_path)
    tier(cache)._rest_until_s = float("inf")
    serve(cache, PROMPTS[0])
    page = cache.cache.index.match(cache._keys.page_keys(PROMPTS[0]))[4]
    cache.mover.arena.rows[page, 3] ^= 1
    tier(cache)._rest_until_s = 0.0
    tier(cache)._spill_next()
    tier(cache).settle(cache._keys.epoch)
    assert figures(cache)["pages"] == 4
    assert figures(cache)["states"] == 0
    assert figures(cache)["errors_total"]["checksum"] == 1  # type: ignore[index]
    assert len(cache.cache.index) == 4  # the damaged page and all below it are given up
    assert serve(cache, PROMPTS[0]).cached_tokens == 0
    spill_all(cache)
    assert figures(cache)["pages"] == 15
    assert figures(cache)["errors_total"]["checksum"] == 1  # type: ignore[index]
    assert_idle(cache)
    cache.close()


def test_disk_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    first = start(tmp_path)
    serve(first, PROMPTS[0])
    first.close()
    second = start(tmp_path)
    disk, now = tier(second), [100.0]
    disk._clock = lambda: now[0]
    seq = make_sequence(next(_ids), PROMPTS[0])
    plan = second.plan(seq)
    assert (plan.kind, plan.reason) == (PlanKind.HOLD, "disk")
    second.abandon(plan)
    now[0] += 6.0
    plan = second.plan(seq)
    assert plan.kind is PlanKind.MISS
    second.restore(seq, plan)
    prefill(second, seq)
    second.finish(seq)
    disk.settle(second._keys.epoch)  # it answers after all: what was stored meanwhile stays
    assert_idle(second)
    second.close()


def test_directory_of_a_running_rank_and_settings_that_cannot_work_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hicache.disk, "LOCK_PATIENCE_S", 0.1)
    cache = start(tmp_path)
    with pytest.raises(MachineError, match="in use"):
        start(tmp_path)
    cache.close()
    with pytest.raises(ConfigError, match="four window states"):
        start(tmp_path, disk_bytes=4096)
    config = HiCacheConfig(disk_gb=1.0)
    with pytest.raises(ConfigError, match="no directory"):
        PrefixCache(config, FakeKV(), "model", KEEP, num_bytes=100 * FRAME)  # type: ignore[arg-type]


WRITER = """
import sys
from pathlib import Path
from tests.engine.test_disk_tier import PROMPTS, serve, start, tier
cache = start(Path(sys.argv[1]))
while True:
    for number, prompt in enumerate(PROMPTS):
        serve(cache, [number, *prompt])
        tier(cache)._rest_until_s = 0.0
        print(tier(cache).store.num_bytes, flush=True)
    cache.reset()
"""


@pytest.mark.parametrize("after", [3, 11])
def test_killed_writer_leaves_a_directory_that_opens_and_restores_only_whole_pages(tmp_path: Path, after: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(after):
        assert writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    cache = start(tmp_path)
    found = figures(cache)
    hits = [serve(cache, [number, *prompt]).cached_tokens for number, prompt in enumerate(PROMPTS)]  # checks every byte
    assert set(hits) <= {0, 56}
    assert found["errors_total"]["refused_file"] == 0  # type: ignore[index]
    assert cache.stats()["checksum_errors_total"] == 0
    tier(cache).settle(cache._keys.epoch)
    assert_idle(cache)
    cache.close()
