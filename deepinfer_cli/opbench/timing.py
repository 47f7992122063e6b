"""How long a call takes: several contenders side by side, sample by sample, so that a drift of the machine meets them all.

On a GPU the calls of one sample are captured into a graph: a launch costs more than a small kernel, and two events around one tiny
kernel read 17 to 29 us of their own. On a CPU a sample is a loop.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepinfer_cli.opbench.case import Call

SAMPLE_US = 4_000.0
MAX_REPEATS = 200
NUM_SAMPLES, NUM_LONG_SAMPLES, LONG_US = 30, 8, 100_000.0
CPU_SAMPLE_US, CPU_SAMPLES = 2_000.0, 8


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call, one number a sample. captured: the calls ran from a graph; None where there are no graphs."""

    samples: list[float]
    captured: bool | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def plain(self) -> dict[str, Any]:
        ordered = sorted(self.samples)
        tenth = len(ordered) // 10
        return {"median": self.median, "p10": ordered[tenth], "p90": ordered[-1 - tenth], "n": len(ordered)}


class _Sampler(Protocol):
    captured: bool | None
    estimate_us: float

    def begin(self) -> None: ...

    def collect(self) -> list[float]: ...


def new_event() -> Any:
    """A CUDA event that keeps the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_side_by_side(contenders: Mapping[str, Sequence[Call]], device: str) -> dict[str, Times]:
    """Times of every contender; their samples alternate. Each contender's calls are cycled through within a sample."""
    make: Callable[[Sequence[Call]], _Sampler] = _GpuSampler if device == "cuda" else _CpuSampler
    made = {name: make(calls) for name, calls in contenders.items()}
    slowest = max(sampler.estimate_us for sampler in made.values())
    num = CPU_SAMPLES if device == "cpu" else NUM_LONG_SAMPLES if slowest > LONG_US else NUM_SAMPLES
    for _ in range(num):
        for sampler in made.values():
            sampler.begin()
    return {name: Times(sampler.collect(), sampler.captured) for name, sampler in made.items()}


def _cycle(calls: Sequence[Call], count: int) -> Callable[[], None]:
    def run() -> None:
        for i in range(count):
            calls[i % len(calls)]()

    return run


class _CpuSampler:
    """A loop between two readings of the clock."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.captured: bool | None = None
        self._samples: list[float] = []
        calls[0]()
        began = time.perf_counter()
        calls[-1]()
        self.estimate_us = max((time.perf_counter() - began) * 1e6, 0.1)
        self._count = max(1, min(MAX_REPEATS, math.ceil(CPU_SAMPLE_US / self.estimate_us)))
        self._run = _cycle(calls, self._count)

    def begin(self) -> None:
        began = time.perf_counter()
        self._run()
        self._samples.append((time.perf_counter() - began) * 1e6 / self._count)

    def collect(self) -> list[float]:
        return self._samples


class _GpuSampler:
    """A graph of many calls between two events. A contender that cannot be captured is timed as it is."""

    captured: bool | None

    def __init__(self, calls: Sequence[Call]) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._events: list[tuple[Any, Any]] = []
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for call in calls:
                call()
            self.estimate_us = self._estimate(calls)
            self._count = max(1, min(MAX_REPEATS, math.ceil(SAMPLE_US / self.estimate_us)))
            if self._count >= len(calls):
                self._count -= self._count % len(calls)
            eager = _cycle(calls, self._count)
            self._run, self.captured = self._capture(eager)
            self._run()
        self._stream.synchronize()

    def _estimate(self, calls: Sequence[Call]) -> float:
        first, last = new_event(), new_event()
        first.record()
        for call in calls[:8]:
            call()
        last.record()
        last.synchronize()
        return max(float(first.elapsed_time(last)) * 1e3 / len(calls[:8]), 1.0)

    def _capture(self, eager: Callable[[], None]) -> tuple[Callable[[], None], bool]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                eager()
        except (RuntimeError, torch.AcceleratorError):
            # The op reads a result on the host. It is timed with its launches; the record says that it was not captured.
            torch.cuda.synchronize()
            return eager, False
        return graph.replay, True

    def begin(self) -> None:
        first, last = new_event(), new_event()
        with torch.cuda.stream(self._stream):
            first.record()
            self._run()
            last.record()
        self._stream.synchronize()
        self._events.append((first, last))

    def collect(self) -> list[float]:
        return [first.elapsed_time(last) * 1e3 / self._count for first, last in self._events]


def kernels_of(call: Call) -> int:
    """Kernels that one call starts on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    # The trace also holds the launches, which the host made.
    on_device = [event.name for event in trace.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum("Memcpy" not in name and "Memset" not in name for name in on_device)
