"""A rank is killed and started again: what it had stored hits, what it was writing does not, what it forgot stays forgotten."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from engine.prefix_cache import PrefixCache
from hicache.config import HiCacheConfig
from hicache.host_pool import Owner
from hicache.records import Kind
from hicache.segment import CacheHome
from tests.engine.test_prefix_cache import FRAME, KEEP, admit, assert_idle, device, prefill, run
from tests.hicache.fake_kv import FakeKV, make_sequence

PROMPTS = [[7 * i % 50 for i in range(begin, begin + 41)] for begin in range(0, 900, 90)]


def start(directory: Path, num_frames: int = 200, secret: bytes = b"s" * 32, **knobs: object) -> PrefixCache:
    config = HiCacheConfig(min_restore_tokens=1, **{"audit": "full", **knobs})  # type: ignore[arg-type]
    home = CacheHome(directory, "dix-test", 0, 1, secret)
    return PrefixCache(config, FakeKV(), "model", KEEP, num_bytes=num_frames * FRAME, home=home)  # type: ignore[arg-type]


def kill(cache: PrefixCache) -> None:
    """The process is gone: its lock with it, its memory as it was."""
    assert cache.mover.segment is not None
    cache.mover.segment.close()


def hits(cache: PrefixCache, prompts: list[list[int]]) -> list[int]:
    return [run(cache, prompt).cached_tokens or 0 for prompt in prompts]


def test_restarted_rank_hits_everything_that_was_stored(tmp_path: Path) -> None:
    first = start(tmp_path)
    for prompt in PROMPTS:
        run(first, prompt)
    kill(first)
    second = start(tmp_path)
    assert second.sources.recovery.pages == first.stats()["frames"]["page"]
    assert second.sources.recovery.states == first.stats()["states"]
    assert second.sources.recovery.dropped == 0
    assert_idle(second)
    assert hits(second, PROMPTS) == [32] * len(PROMPTS)
    assert second.stats()["checksum_errors_total"] == 0
    assert_idle(second)


def test_page_that_was_being_written_is_dropped_with_all_below_it(tmp_path: Path) -> None:
    first = start(tmp_path)
    run(first, PROMPTS[0])
    path = first.cache.index.match(first._keys.page_keys(PROMPTS[0]))
    first.mover.records.clear([path[5]])  # type: ignore[union-attr]
    kill(first)
    second = start(tmp_path)
    assert second.sources.recovery.pages == 5
    assert second.sources.recovery.dropped > 0
    assert_idle(second)
    assert hits(second, [PROMPTS[0], PROMPTS[0]]) == [0, 32]


def test_bytes_that_differ_from_their_checksum_are_not_taken_over(tmp_path: Path) -> None:
    first = start(tmp_path)
    for prompt in PROMPTS:
        run(first, prompt)
    page = first.cache.index.match(first._keys.page_keys(PROMPTS[0]))[3]
    first.mover.arena.rows[page, 10] ^= 1
    kill(first)
    second = start(tmp_path)
    assert second.sources.recovery.dropped > 0
    assert hits(second, PROMPTS)[0] == 0
    assert_idle(second)


def test_a_rank_killed_in_the_middle_of_a_prefill_keeps_its_chunks(tmp_path: Path) -> None:
    first = start(tmp_path, herd_min_tokens=0)
    run(first, PROMPTS[1])
    seq = make_sequence(10**6, PROMPTS[0])
    admit(first, seq)
    prefill(first, seq, stop_after=3)
    kill(first)
    second = start(tmp_path)
    assert_idle(second)
    assert second.sources.recovery.pages == 10 + 6
    assert hits(second, [PROMPTS[1]]) == [32]


def test_another_secret_model_or_size_starts_empty_with_a_reason(tmp_path: Path) -> None:
    first = start(tmp_path)
    run(first, PROMPTS[0])
    kill(first)
    second = start(tmp_path, secret=b"t" * 32)
    assert "another model" in second.mover.segment.note  # type: ignore[union-attr]
    assert hits(second, [PROMPTS[0]]) == [0]
    kill(second)
    assert "sizes" in start(tmp_path, num_frames=100).mover.segment.note  # type: ignore[union-attr]


def test_what_a_reset_forgot_stays_forgotten(tmp_path: Path) -> None:
    first = start(tmp_path)
    run(first, PROMPTS[0])
    first.reset()
    run(first, PROMPTS[1])
    kill(first)
    second = start(tmp_path)
    assert hits(second, [PROMPTS[1], PROMPTS[0]]) == [32, 0]


def test_evicted_frames_are_never_taken_over_as_what_they_were(tmp_path: Path) -> None:
    """Kill after every one of many random runs in a small arena: what comes back is exactly what the index held, byte for byte."""
    rng = random.Random(1)
    for _ in range(12):
        cache = start(tmp_path, num_frames=40)
        assert_idle(cache)
        for _ in range(6):
            base = rng.choice(PROMPTS)
            run(cache, base[: rng.randrange(9, 41)] + [rng.randrange(50) for _ in range(rng.randrange(12))])
        index = cache.cache.index
        before = {index.key(frame): frame for frame in index.pages()}
        states = len(index.states)
        kill(cache)
        again = start(tmp_path, num_frames=40)
        found = again.cache.index
        assert {found.key(frame): frame for frame in found.pages()} == before
        assert len(again.cache.index.states) == states
        assert again.cache.pool.count(Owner.PAGE) == len(before)
        kill(again)


def test_private_arena_makes_no_file(tmp_path: Path) -> None:
    cache = start(tmp_path, segment="private")
    run(cache, PROMPTS[0])
    assert not list(tmp_path.iterdir())


def child(directory: str) -> None:
    """Stores prompts for ever, until it is killed."""
    cache = start(Path(directory), num_frames=400)
    rng, count = random.Random(os.getpid()), 0
    while True:
        run(cache, [rng.randrange(50) for _ in range(41)])
        count += 1
        if count % 20 == 0:
            print(count, flush=True)


def test_real_kill_at_a_random_moment_leaves_only_intact_pages(tmp_path: Path) -> None:
    code = f"from tests.engine.test_prefix_cache_restart import child; child({str(tmp_path)!r})"
    for pause_s in (0.0, 0.013, 0.027):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(pause_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        cache = start(tmp_path, num_frames=400)
        assert_idle(cache)
        assert cache.sources.recovery.pages > 100
        records, arena = cache.mover.records, cache.mover.arena
        for frame in cache.cache.index.pages():
            record = records.read(frame)  # type: ignore[union-attr]
            assert record is not None
            assert record.kind is Kind.PAGE
            row = arena.memory[frame * FRAME : frame * FRAME + device(cache).blocks.shape[1]]
            assert zlib.crc32(row) == record.checksum
        kill(cache)


def test_locks_and_files_are_given_back(tmp_path: Path) -> None:
    cache = start(tmp_path)
    cache.close()
    cache.close()
    again = start(tmp_path)
    assert again.mover.segment is not None
    assert again.mover.segment.reused


@pytest.mark.parametrize("audit", ["off", "sampled"])
def test_unverified_pages_are_taken_over_too(tmp_path: Path, audit: str) -> None:
    first = start(tmp_path, audit=audit)
    run(first, PROMPTS[0])
    kill(first)
    assert hits(start(tmp_path, audit="full"), [PROMPTS[0]]) == [32]
