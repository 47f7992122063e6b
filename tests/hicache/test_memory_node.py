"""Placing memory: processors of a node, binding, huge pages; on machines with one node and none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache.config import HiCacheConfig
from hicache.errors import ConfigError, MachineError
from hicache.host_pool import HostArena
from hicache.memory_node import ask_for_huge_pages, bind_to_node, huge_share, node_cpus, require_huge_pages


def test_processors_of_a_node_are_read_and_limited_to_ours(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / "node1" / "cpulist").write_text(f"{mine[0]}-{mine[-1]},4000-4003\n")
    assert node_cpus(1, tmp_path) == mine
    assert node_cpus(7, tmp_path) == []


def test_memory_can_be_bound_to_the_only_node_and_a_missing_one_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    arena = HostArena(4, 4096)
    bound = bind_to_node(arena, 0)
    assert bound or "not bound to node 0" in caplog.text  # some containers forbid the call
    arena.rows.fill_(3)
    assert (arena.rows == 3).all()
    assert not bind_to_node(arena, 5000)
    assert "not bound to node 5000" in caplog.text


def test_share_of_huge_pages_is_a_share_and_their_absence_has_a_remedy() -> None:
    arena = HostArena(2048, 4096)
    asked = ask_for_huge_pages(arena)
    arena.rows.fill_(1)
    share = huge_share(arena.rows)
    assert 0.0 <= share <= 1.0
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not asked or not enabled.exists() or "[never]" in enabled.read_text():
        assert share == 0.0
    if share < 0.9:
        with pytest.raises(MachineError, match="huge pages"):
            require_huge_pages(arena)


@pytest.mark.parametrize("value", ["everywhere", "-1", ""])
def test_unknown_node_names_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="numa"):
        HiCacheConfig(numa=value)
