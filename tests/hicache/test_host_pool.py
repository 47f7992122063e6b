"""Frames: one owner each, and memory only where it was touched."""

from __future__ import annotations

import psutil
import pytest

import hicache.host_pool
from hicache.errors import MachineError
from hicache.host_pool import POISON, FramePool, HostArena, Owner, frame_bytes_for, map_arena


def test_frame_is_the_row_rounded_up_to_four_kib() -> None:
    assert [frame_bytes_for(n) for n in (1, 4096, 4097, 114_048)] == [4096, 4096, 8192, 114_688]


def test_arena_takes_no_memory_before_it_is_touched() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    arena = HostArena(2**16, 4096)
    assert arena.num_bytes == 2**28
    arena.rows[0].fill_(1)
    assert process.memory_info().rss - before < 2**26


def test_arena_rows_and_memory_are_the_same_bytes() -> None:
    arena = HostArena(3, 4096)
    arena.rows[1, 5] = 77
    assert arena.memory[4096 + 5] == 77
    arena.poison([1])
    assert set(arena.rows[1].tolist()) == {POISON}
    assert not arena.rows[2].any()


def test_frames_come_back_last_in_first_out() -> None:
    pool = FramePool(4)
    assert sorted(pool.take(2)) == [0, 1]
    pool.free([0])
    assert pool.take(1) == [0]


def test_double_free_and_taking_too_many_are_caught() -> None:
    pool = FramePool(2)
    frames = pool.take(1)
    pool.free(frames)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(frames)
    with pytest.raises(AssertionError, match="took 3 of 2"):
        pool.take(3)


def test_frame_can_be_assigned_once_after_its_reservation() -> None:
    pool = FramePool(2)
    frames = pool.take(2)
    assert pool.count(Owner.RESERVED) == 2
    pool.assign(frames[:1], Owner.PAGE)
    with pytest.raises(AssertionError, match="not RESERVED"):
        pool.assign(frames[:1], Owner.STATE)
    assert {o: pool.count(o) for o in Owner if pool.count(o)} == {Owner.RESERVED: 1, Owner.PAGE: 1}


def test_frames_that_come_later_join_behind_the_free_ones() -> None:
    pool = FramePool(6, num_usable=2)
    assert (pool.num_free, pool.count(Owner.ABSENT)) == (2, 4)
    held = pool.take(1)
    pool.add(range(2, 5))
    assert (pool.num_free, pool.count(Owner.ABSENT)) == (4, 1)
    assert pool.take(2) == [2, 1]
    pool.free(held)
    with pytest.raises(AssertionError, match="not absent"):
        pool.add(range(1, 3))
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([5])


def test_arena_that_cannot_be_mapped_is_halved_until_it_can_or_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Scarce(HostArena):
        def __init__(self, num_frames: int, frame_bytes: int) -> None:
            asked.append(num_frames)
            if num_frames > 20:
                raise MachineError(f"cannot map {num_frames} frames")
            super().__init__(num_frames, frame_bytes)

    monkeypatch.setattr(hicache.host_pool, "HostArena", Scarce)
    assert map_arena(100, 4096, least_bytes=4096).num_frames == 12
    assert asked == [100, 50, 25, 12]
    with pytest.raises(MachineError, match="25 frames"):
        map_arena(100, 4096, least_bytes=20 * 4096)
