"""Steps recorded once and replayed: no launch is left on the CPU's way. Which sizes are recorded, how, and what it took.

A recorded step reads buffers of fixed addresses, so a step of n rows runs in the smallest recorded size that holds it; the rows
behind are padding. The same code runs with a recorder that records nothing, which is how it is tested without a GPU.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from engine.distributed import GroupError
from engine.errors import NotEnoughMemory

if TYPE_CHECKING:
    from engine.parallel.tensor_group import TensorGroup

log = logging.getLogger(__name__)

Replay = Callable[[], None]
Made = TypeVar("Made")

# Fine steps where a step's time grows with every row, coarse ones where it hardly does.
_FINE, _FINE_UNTIL, _COARSE = 8, 64, 32


def bucket_sizes(limit: int, interval: int | None = None) -> list[int]:
    """Row counts to record, ascending, the last one `limit`: powers of two below the interval, then its multiples.

    Without an interval they are 1, 2, 4, 8, 16, 24, 32, 48, 64 and then every 32nd.
    """
    if interval is None:
        sizes = {1, 2, 4, *range(_FINE, 4 * _FINE + 1, _FINE), 48, *range(_FINE_UNTIL, limit, _COARSE)}
        return sorted({size for size in sizes if size < limit} | {limit})
    interval = min(interval, limit)
    powers = {2**k for k in range(interval.bit_length()) if 2**k < interval}
    return sorted(powers | set(range(interval, limit, interval)) | {limit})


class Recorder(Protocol):
    """Turns a function without arguments into one that does the same work again. What recordings need beforehand is made by `prepare`:
    ranks that record together have to hear of a failure there as well."""

    def prepare(self, make: Callable[[], Made]) -> Made: ...

    def record(self, run: Callable[[], None]) -> Replay: ...

    @property
    def reserved_bytes(self) -> int: ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool. They must be dropped before communicators are."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def prepare(self, make: Callable[[], Made]) -> Made:
        return make()

    def record(self, run: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Once without recording: kernels are compiled and libraries make their workspaces.
            run()
            self._stream.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay

    @property
    def reserved_bytes(self) -> int:
        # Recording returns unused blocks of before; without this they would be counted against it.
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()


class NullRecorder:
    """Records nothing: a replay is the function itself. For tests of everything around a graph."""

    def prepare(self, make: Callable[[], Made]) -> Made:
        return make()

    def record(self, run: Callable[[], None]) -> Replay:
        run()
        return run

    @property
    def reserved_bytes(self) -> int:
        return 0


class GroupRecorder:
    """Records on all ranks of a group or on none. Ranks whose steps hold collectives make the same recordings in the same order.

    The run before each recording makes the communicator's connections, which cannot be made in a recording.
    """

    def __init__(self, recorder: Recorder, group: TensorGroup) -> None:
        self._recorder, self._group = recorder, group

    def prepare(self, make: Callable[[], Made]) -> Made:
        """Raises: as `record`. Ranks that went on recording would wait for one that has given up before its first recording."""
        return self._together(lambda: self._recorder.prepare(make), "prepare its recordings")

    def record(self, run: Callable[[], None]) -> Replay:
        """Raises: RuntimeError on every rank when it failed on one; GroupError when a peer is gone."""
        return self._together(lambda: self._recorder.record(run), "record this step")

    def _together(self, action: Callable[[], Made], what: str) -> Made:
        failure: RuntimeError | GroupError | None = None
        try:
            made = action()
        except (RuntimeError, GroupError) as error:  # of a collective too: the communicator may lack memory, or refuse a recording
            failure = error
            log.warning("this rank could not %s: %s", what, error)
        try:
            [somewhere] = self._group.max([int(failure is not None)])
        except GroupError as lost:
            raise (failure or lost) from lost
        if isinstance(failure, GroupError):
            raise RuntimeError(str(failure)) from failure
        if failure is not None:
            raise failure
        if somewhere:
            raise RuntimeError(f"another rank could not {what}, see its log")
        return made

    @property
    def reserved_bytes(self) -> int:
        return self._recorder.reserved_bytes


@dataclass(frozen=True, slots=True)
class RecordingReport:
    """What recording took: how many sizes, seconds, and bytes that the device gave for it."""

    name: str
    sizes: tuple[int, ...]
    seconds: float
    reserved_bytes: int

    def __str__(self) -> str:
        size = f"{self.reserved_bytes / 2**20:.0f} MiB"
        return f"{self.name}: {len(self.sizes)} graphs up to {self.sizes[-1]} rows, {self.seconds:.1f} s, {size}"


class StepGraphs:
    """One recorded step per size. The step is a function of the size that reads and writes fixed buffers."""

    def __init__(self, name: str, step: Callable[[int], None], sizes: Sequence[int], recorder: Recorder) -> None:
        """Record every size, the largest first: the memory of the smaller ones then fits into what it left.

        Raises:
            NotEnoughMemory: the device has too little left.
        """
        began, before = time.monotonic(), recorder.reserved_bytes
        self._sizes = sorted(sizes)
        self._replays: dict[int, Replay] = {}
        for size in reversed(self._sizes):
            try:
                self._replays[size] = recorder.record(partial(step, size))
            except torch.OutOfMemoryError as error:
                raise NotEnoughMemory(
                    f"recording {name} steps of {size} rows needs more memory than the cache left: {error}",
                    hint="lower engine.memory_fraction or engine.max_num_seqs, or set engine.enforce_eager",
                ) from error
        taken = recorder.reserved_bytes - before
        self.report = RecordingReport(name, tuple(self._sizes), time.monotonic() - began, taken)
        log.info("%s", self.report)

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def size_for(self, num_rows: int) -> int:
        """The smallest recorded size that holds `num_rows` rows."""
        assert 0 < num_rows <= self.max_rows, f"{num_rows} rows, recorded are up to {self.max_rows}"
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def replay(self, size: int) -> None:
        self._replays[size]()

    def close(self) -> None:
        """Give the recordings up."""
        self._replays.clear()
