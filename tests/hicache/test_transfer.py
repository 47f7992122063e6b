"""Copies between device rows and frames move exactly the named rows."""

from __future__ import annotations

import torch

from hicache.host_pool import HostArena
from hicache.transfer import CpuTransfer


def test_rows_survive_the_way_out_and_back_in_any_order() -> None:
    arena = HostArena(6, 4096)
    device = torch.randint(0, 256, (5, 100), dtype=torch.uint8)
    original = device.clone()
    transfer = CpuTransfer(arena)
    transfer.copy_out(device, [4, 0, 2], [1, 5, 3])
    device.zero_()
    transfer.copy_in([3, 1], device, [2, 4])
    assert device[2].equal(original[2])
    assert device[4].equal(original[4])
    assert not device[[0, 1, 3]].any()
    assert not arena.rows[:, 100:].any()
    assert not arena.rows[[0, 2, 4]].any()


def test_empty_list_copies_nothing() -> None:
    arena = HostArena(2, 4096)
    CpuTransfer(arena).copy_out(torch.ones(2, 8, dtype=torch.uint8), [], [])
    assert not arena.rows.any()
