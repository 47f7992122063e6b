"""Copies between device rows (cache blocks, state staging) and host frames, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hicache.host_pool import HostArena


class Transfer(Protocol):
    """Moves whole rows, in order with the model's own work on the same stream. A call only enqueues.

    device: [N, row_bytes] uint8 with row_bytes <= frame_bytes. rows[i] belongs to frames[i]; frames of one call are distinct.
    """

    name: str

    def copy_in(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> None:
        """Host frames -> device rows."""

    def copy_out(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        """Device rows -> host frames."""


class CpuTransfer:
    """Device memory is host memory: vectorised gathers and scatters, complete when the call returns."""

    name = "cpu"

    def __init__(self, arena: HostArena) -> None:
        self._rows = arena.rows

    def copy_in(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> None:
        _copy_rows(self._rows[:, : device.shape[1]], frames, device, rows)

    def copy_out(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        _copy_rows(device, rows, self._rows[:, : device.shape[1]], frames)


def _copy_rows(source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]) -> None:
    assert len(source_rows) == len(target_rows), f"{len(source_rows)} rows for {len(target_rows)} places"
    if not source_rows:
        return
    picked = source.index_select(0, torch.tensor(source_rows, dtype=torch.int64))
    target.index_copy_(0, torch.tensor(target_rows, dtype=torch.int64), picked)
