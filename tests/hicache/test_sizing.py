"""Arena sizes."""

from __future__ import annotations

from hicache.config import HiCacheConfig
from hicache.sizing import GIB, arena_bytes, available_host_bytes


def test_size_counts_gib_and_auto_is_an_eighth_of_one_on_cpu() -> None:
    assert arena_bytes(HiCacheConfig(size_gb=0.5), "cpu") == GIB // 2
    assert arena_bytes(HiCacheConfig(size_gb=0), "cuda") == 0
    assert arena_bytes(HiCacheConfig(), "cpu") == GIB // 8


def test_auto_beside_a_gpu_is_shared_by_the_ranks_of_the_host() -> None:
    one, four = arena_bytes(HiCacheConfig(), "cuda"), arena_bytes(HiCacheConfig(), "cuda", ranks=4)
    assert 0 <= one <= available_host_bytes() // 4
    assert abs(one - 4 * four) <= GIB
