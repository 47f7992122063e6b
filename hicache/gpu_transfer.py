"""Copies beside an NVIDIA GPU: a gather/scatter kernel over mapped host memory, batched copy engines, and a probe that picks.

Every call enqueues on the current stream and returns. Host frames are page-locked (see `hicache/pinning.py`).
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csrc.loader import bind
from hicache.host_pool import HostArena
from hicache.native import check_status
from hicache.transfer import Transfer

KERNEL_BLOCKS = 8  # enough to fill PCIe 5; more than 16 slow the model's own kernels
_FIRST_ROWS, _MOST_ROWS = 512, 4064  # rows of the first launch, and of any (the kernel's argument)
_MERGE_LIMIT = 2**30
_BOUNCE_ROWS = 256
PROBE_PAGES = (1, 16, 256)
_PROBE_ROUNDS = 3


class KernelTransfer:
    """One launch per call reads or writes the host frames over the bus. Best for pages and smaller pieces.

    host_pointer: the device's address of the arena's first frame; the frames follow it without gaps. chained: launches of one call begin
    while the one before ends, where the device can.
    """

    name = "kernel"

    def __init__(
        self, arena: HostArena, library: ctypes.CDLL, host_pointer: int, num_blocks: int = KERNEL_BLOCKS, chained: bool = True
    ) -> None:
        pointer, number, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        types = [pointer, pointer, pointer, pointer, integer, number, number, number, integer, integer, pointer]
        self._launch = bind(library, "dix_page_copy", types)
        self._library, self._arena, self._host, self._num_blocks = library, arena, host_pointer, num_blocks
        self._chained = chained and torch.cuda.get_device_capability()[0] >= 9

    def copy_in(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> None:
        self._copy(self._host, self._arena.frame_bytes, frames, device.data_ptr(), device.stride(0), rows, device.shape[1])

    def copy_out(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        self._copy(device.data_ptr(), device.stride(0), rows, self._host, self._arena.frame_bytes, frames, device.shape[1])

    def _copy(
        self, source: int, source_stride: int, first: Sequence[int], target: int, target_stride: int, second: Sequence[int], row_bytes: int
    ) -> None:
        assert len(first) == len(second), f"{len(first)} rows for {len(second)} places"
        stream, begin, size = torch.cuda.current_stream().cuda_stream, 0, _FIRST_ROWS
        while begin < len(first):
            # While the first rows are under way the numbers of the others are packed. Each launch costs about 10 us of the bus.
            end = begin + size
            here, there = _packed(first[begin:end]), _packed(second[begin:end])
            addresses = here.buffer_info()[0], there.buffer_info()[0]
            # The launch copies the numbers, so these arrays need to live no longer than the call.
            follows = int(self._chained and begin > 0)
            status = self._launch(
                source, target, *addresses, len(here), source_stride, target_stride, row_bytes, self._num_blocks, follows, stream
            )
            check_status(self._library, status, "page copy")
            begin, size = end, _MOST_ROWS


def _packed(numbers: Sequence[int]) -> array[int]:
    """Row numbers as int32: four times as fast through `fromlist` as through array's own loop, and ninety times as a tensor."""
    packed = array("i")
    packed.fromlist(numbers if isinstance(numbers, list) else list(numbers))
    return packed


class BatchTransfer:
    """One submission per call to the copy engines, which leaves the multiprocessors alone. Best for runs of neighbouring frames.

    borders: first frames of the pieces in which the arena was registered; no copy crosses one.
    """

    name = "batch"

    def __init__(self, arena: HostArena, library: ctypes.CDLL, borders: Sequence[int] = ()) -> None:
        pointer = ctypes.c_void_p
        self._submit = bind(library, "dix_batch_copy", [pointer, pointer, pointer, ctypes.c_size_t, pointer])
        self._library, self._arena, self._borders = library, arena, frozenset(borders)
        self._host = arena.rows.data_ptr()

    def copy_in(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> None:
        runs = merge_runs(frames, rows, self._mergeable(device), self._borders)
        self._copy([(self._frame(f), self._row(device, r), n) for f, r, n in runs], device.shape[1])

    def copy_out(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        runs = merge_runs(frames, rows, self._mergeable(device), self._borders)
        self._copy([(self._row(device, r), self._frame(f), n) for f, r, n in runs], device.shape[1])

    def _mergeable(self, device: Tensor) -> int:
        """Most neighbours in one copy: only rows without gaps on both sides can be merged."""
        gapless = device.stride(0) == device.shape[1] == self._arena.frame_bytes
        return _MERGE_LIMIT // self._arena.frame_bytes if gapless else 1

    def _frame(self, frame: int) -> int:
        return self._host + frame * self._arena.frame_bytes

    def _row(self, device: Tensor, row: int) -> int:
        return device.data_ptr() + row * device.stride(0)

    def _copy(self, copies: list[tuple[int, int, int]], row_bytes: int) -> None:
        if not copies:
            return
        stream = torch.cuda.current_stream().cuda_stream
        assert stream != 0, "batched copies need a stream of their own: the legacy default stream is rejected"
        array = ctypes.c_void_p * len(copies)
        sizes = (ctypes.c_size_t * len(copies))(*(n * row_bytes for _, _, n in copies))
        sources, targets = array(*(s for s, _, _ in copies)), array(*(t for _, t, _ in copies))
        check_status(self._library, self._submit(sources, targets, sizes, len(copies), stream), "batched copy")


class BounceTransfer:
    """For an arena that could not be page-locked: through a pinned buffer, the CPU moving the other half of the way.

    Stores wait for the device; slower than the other engines, and correct everywhere.
    """

    name = "bounce"

    def __init__(self, arena: HostArena, num_rows: int = _BOUNCE_ROWS) -> None:
        self._arena, self._num_rows = arena, num_rows
        self._buffer = torch.empty(num_rows, arena.frame_bytes, dtype=torch.uint8, pin_memory=True)
        self._busy: torch.cuda.Event | None = None

    def copy_in(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> None:
        for begin in range(0, len(frames), self._num_rows):
            buffer = self._rows(frames[begin : begin + self._num_rows], device)
            torch.index_select(self._arena.rows[:, : device.shape[1]], 0, _index(frames[begin : begin + self._num_rows]), out=buffer)
            target = _index(rows[begin : begin + self._num_rows]).to(device.device)
            device.index_copy_(0, target, buffer.to(device.device, non_blocking=True))
            self._busy = torch.cuda.current_stream().record_event()

    def copy_out(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        for begin in range(0, len(frames), self._num_rows):
            buffer = self._rows(frames[begin : begin + self._num_rows], device)
            buffer.copy_(device.index_select(0, _index(rows[begin : begin + self._num_rows]).to(device.device)))
            self._arena.rows[:, : device.shape[1]].index_copy_(0, _index(frames[begin : begin + self._num_rows]), buffer)

    def _rows(self, frames: Sequence[int], device: Tensor) -> Tensor:
        """The buffer as [len(frames), row_bytes], free to be written."""
        if self._busy is not None:
            self._busy.synchronize()
        return self._buffer.view(-1)[: len(frames) * device.shape[1]].view(len(frames), device.shape[1])


def _index(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def merge_runs(frames: Sequence[int], rows: Sequence[int], most: int, borders: frozenset[int]) -> list[tuple[int, int, int]]:
    """(frame, row, count) of runs that are contiguous on both sides, at most `most` long and within one registration."""
    runs: list[tuple[int, int, int]] = []
    for frame, row in zip(frames, rows, strict=True):
        if runs and frame not in borders:
            first_frame, first_row, count = runs[-1]
            if count < most and frame == first_frame + count and row == first_row + count:
                runs[-1] = (first_frame, first_row, count + 1)
                continue
        runs.append((frame, row, 1))
    return runs


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """One measurement: GB/s of `engine` for a call of `num_pages` pages in one direction ("in": host to device)."""

    engine: str
    direction: str
    num_pages: int
    gb_s: float


def probe(engines: Sequence[Transfer], num_frames: int, device: Tensor, sizes: Sequence[int] = PROBE_PAGES) -> list[ProbeRow]:
    """Time every engine in both directions. Overwrites the first rows of `device` (scratch) and the last of the first `num_frames` frames,
    before they hold data.
    """
    table = []
    for num_pages in sizes:
        rows = list(range(1, 1 + min(num_pages, device.shape[0] - 1, num_frames)))  # row 0 is the dummy block
        frames = [num_frames - row for row in rows]  # descending: scattered for anything that merges
        for engine in engines:
            for direction in ("in", "out"):
                seconds = min(_timed(engine, direction, frames, device, rows) for _ in range(_PROBE_ROUNDS))
                table.append(ProbeRow(engine.name, direction, num_pages, len(rows) * device.shape[1] / seconds / 1e9))
    return table


def _timed(engine: Transfer, direction: str, frames: list[int], device: Tensor, rows: list[int]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    if direction == "in":
        engine.copy_in(frames, device, rows)
    else:
        engine.copy_out(device, rows, frames)
    torch.cuda.synchronize()
    return time.perf_counter() - began


class ProbedTransfer:
    """Uses the engine that was fastest for the direction and the size of a call."""

    name = "auto"

    def __init__(self, engines: Sequence[Transfer], table: Sequence[ProbeRow]) -> None:
        self.table = list(table)
        self._sizes = sorted({row.num_pages for row in table})
        by_name = {engine.name: engine for engine in engines}
        self._best = {
            (direction, size): by_name[
                max((r for r in table if (r.direction, r.num_pages) == (direction, size)), key=lambda r: r.gb_s).engine
            ]
            for direction in ("in", "out")
            for size in self._sizes
        }

    def engine(self, direction: str, num_pages: int) -> Transfer:
        """The engine for a call: measured at the largest probed size that is not above `num_pages`."""
        size = max((s for s in self._sizes if s <= num_pages), default=self._sizes[0])
        return self._best[direction, size]

    def copy_in(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> None:
        self.engine("in", len(frames)).copy_in(frames, device, rows)

    def copy_out(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        self.engine("out", len(frames)).copy_out(device, rows, frames)
