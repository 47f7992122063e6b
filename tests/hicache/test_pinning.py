"""Faulting an arena in before it is page-locked."""

from __future__ import annotations

from pathlib import Path

from hicache.host_pool import HostArena
from hicache.pinning import touch
from hicache.segment import CacheHome, Layout, open_segment

LAYOUT = Layout(num_frames=7, frame_bytes=4096, frames_per_state=2, page_tokens=4, ranks=1, proof=b"p" * 32)


def arena(directory: Path) -> HostArena:
    segment = open_segment(CacheHome(directory, "dix-test", 0, 1, b"s"), LAYOUT)
    made = HostArena(LAYOUT.num_frames, LAYOUT.frame_bytes, segment)
    segment.close()
    return made


def test_bytes_of_a_former_owner_survive_and_new_memory_is_zero(tmp_path: Path) -> None:
    first = arena(tmp_path)
    touch(first, threads=3)
    assert not first.inherited
    assert not first.rows.any()
    first.rows.fill_(7)
    second = arena(tmp_path)
    assert second.inherited
    touch(second, threads=3)
    assert (second.rows == 7).all()
