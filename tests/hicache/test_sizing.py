"""Arena sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.config import HiCacheConfig
from hicache.errors import MachineError
from hicache.sizing import GIB, arena_bytes, available_host_bytes, check_size


def test_size_counts_gib_and_auto_is_an_eighth_of_one_on_cpu() -> None:
    assert arena_bytes(HiCacheConfig(size_gb=0.5), "cpu") == GIB // 2
    assert arena_bytes(HiCacheConfig(size_gb=0), "cuda") == 0
    assert arena_bytes(HiCacheConfig(), "cpu") == GIB // 8


def test_auto_beside_a_gpu_is_shared_by_the_ranks_of_the_host() -> None:
    one, four = arena_bytes(HiCacheConfig(), "cuda"), arena_bytes(HiCacheConfig(), "cuda", ranks=4)
    assert 0 <= one <= available_host_bytes() // 4
    assert abs(one - 4 * four) <= GIB


def test_file_cache_of_the_control_group_counts_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{8 * GIB}")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}")
    assert available_host_bytes(tmp_path) == GIB
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {3 * GIB}\nactive_file 5\n")
    assert available_host_bytes(tmp_path) == 4 * GIB
    (tmp_path / "memory.max").write_text("max")
    assert available_host_bytes(tmp_path) > 4 * GIB


def test_arena_larger_than_what_is_free_is_refused_with_the_size_that_fits() -> None:
    check_size(4 * GIB, 2, 8 * GIB)
    with pytest.raises(MachineError, match=r"5.00 GiB for each of 2 ranks") as refused:
        check_size(5 * GIB, 2, 8 * GIB)
    assert "3.60" in refused.value.hint
    assert refused.value.exit_code == 3
