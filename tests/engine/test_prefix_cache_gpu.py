"""The prefix cache with device blocks in GPU memory: every engine restores exactly the bytes that a forward pass left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.prefix_cache import PrefixCache
from hicache.config import HiCacheConfig
from hicache.segment import CacheHome
from tests.engine.test_prefix_cache import FRAME, KEEP, _ids, assert_idle, next_prompt, prefill
from tests.hicache.fake_kv import FakeKV, make_sequence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.synchronize()


def make_cache(transfer: str, build_dir: Path, num_frames: int) -> PrefixCache:
    config = HiCacheConfig(min_restore_tokens=1, audit="full", transfer=transfer, build_dir=str(build_dir))
    kv = FakeKV(num_blocks=40, device="cuda")
    return PrefixCache(config, kv, "model", KEEP, num_bytes=num_frames * FRAME)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.mark.parametrize("transfer", ["auto", "kernel", "batch"])
def test_random_sessions_restore_exactly_what_was_computed(transfer: str, build_dir: Path) -> None:
    rng, cache = random.Random(7), make_cache(transfer, build_dir, num_frames=60)
    kv: FakeKV = cache.mover._kv  # type: ignore[assignment]
    assert cache.stats()["pinned_bytes"] == 60 * FRAME
    history: list[list[int]] = []
    for _ in range(60):
        tokens = next_prompt(rng, history)
        seq = make_sequence(next(_ids), tokens)
        plan = cache.plan(seq)
        kv.blocks.fill_(0xEE)
        cache.restore(seq, plan)
        seq.checkpoints = cache.checkpoints(seq)
        for block in range(seq.num_computed // kv.block_size):
            assert kv.blocks[seq.block_table[block]].cpu().equal(kv.page_bytes(tokens[: (block + 1) * kv.block_size]))
        if seq.num_computed:
            assert kv.loaded[seq.state_slot][1] == bytes(kv.window_bytes(tokens[: seq.num_computed]).tolist())
        prefill(cache, seq)
        cache.finish(seq)
        history = [*history[-7:], tokens]
    stats = cache.stats()
    assert stats["hit_tokens_total"] > 0
    assert stats["evictions_total"] > 0
    assert stats["checksum_errors_total"] == 0
    assert_idle(cache)
    cache.close()
    cache.close()


def test_flipped_byte_in_the_arena_is_found_by_the_device(build_dir: Path) -> None:
    cache, tokens = make_cache("kernel", build_dir, num_frames=200), list(range(60))
    for expected in (0, None, 0):
        seq = make_sequence(next(_ids), tokens)
        cache.restore(seq, cache.plan(seq))
        assert expected is None or seq.num_computed == expected
        prefill(cache, seq)
        cache.finish(seq)
        torch.cuda.synchronize()
        if expected is None:
            cache.inject_fault("flip")
    assert cache.stats()["checksum_errors_total"] == 1
    assert_idle(cache)
    cache.close()


def test_restarted_rank_and_its_peer_restore_from_the_segment_what_the_gpu_had_computed(build_dir: Path, tmp_path: Path) -> None:
    config = HiCacheConfig(min_restore_tokens=1, audit="full", build_dir=str(build_dir))
    tokens = list(range(41))

    def start(rank: int) -> PrefixCache:
        home = CacheHome(tmp_path, "dix-test", rank, 2, b"s" * 32)
        kv = FakeKV(num_blocks=40, device="cuda")
        return PrefixCache(config, kv, "model", KEEP, num_bytes=60 * FRAME, home=home)  # type: ignore[arg-type]

    def serve(cache: PrefixCache) -> int:
        seq, kv = make_sequence(next(_ids), tokens), cache.mover._kv
        cache.begin_step()
        cache.restore(seq, cache.plan(seq))
        for block in range(seq.num_computed // kv.block_size):
            expected = kv.page_bytes(tokens[: (block + 1) * kv.block_size])  # type: ignore[attr-defined]
            assert kv.blocks[seq.block_table[block]].cpu().equal(expected)
        prefill(cache, seq)
        cache.finish(seq)
        return seq.cached_tokens or 0

    first, peer = start(0), start(1)
    assert serve(first) == 0
    torch.cuda.synchronize()
    first.begin_step()  # its copies are complete, so their records are written now
    assert serve(peer) == 32
    first.close()
    again = start(0)
    assert again.sources.recovery.pages == 10
    assert serve(again) == 32
    assert again.stats()["checksum_errors_total"] == peer.stats()["checksum_errors_total"] == 0
