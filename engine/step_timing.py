"""How long steps take: the cost curves of a start, and the parts of each step that is taken."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.models.draft import DraftSlice
from engine.spec_costs import CostModel, Curve

REPEATS = 5  # timed runs of one point, of which the fastest and the slowest are dropped
MEASURE_S = 0.5  # start-up time for a curve, which clients wait for; points that do not fit are extrapolated


class MeasuredRunner(Protocol):
    """What a measurement needs of a model runner."""

    limits: Any
    kv: Any

    def run_greedy(self, batch: Batch) -> Any: ...

    def draft_greedy(self, slices: list[DraftSlice]) -> Any: ...


def measure(
    runner: MeasuredRunner,
    max_drafts: int,
    places: list[tuple[int, list[int]]],
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = MEASURE_S,
    timer: Callable[[], float] | None = None,
) -> CostModel:
    """Time greedy verify steps and drafts of growing size, with random tokens.

    clock: bounds the whole. timer: of single runs, the clock if None.

    places: a state slot and blocks for `max_drafts` + 1 tokens, for as many sequences as a step may have. They are overwritten.
    Larger sizes come last, so that a slow machine measures the small ones and extrapolates.
    """
    vocab_size = runner.limits.vocab_size
    run = runner.run_greedy
    rng = random.Random(0)
    deadline, timer = clock() + budget_s, timer or clock
    steps, drafts = [], []
    for size in _sizes(len(places) * (max_drafts + 1)):
        batch = _batch(size, max_drafts + 1, places, vocab_size, rng)
        steps.append((size, _timed(partial(run, batch), timer)))
        if size <= len(places):
            run(_batch(size, 1, places, vocab_size, rng))  # drafts read what a step has left in the slots
            slices = [DraftSlice(rng.randrange(vocab_size), 0, slot) for slot, _ in places[:size]]
            drafts.append((size, _timed(partial(runner.draft_greedy, slices), timer)))
        if clock() > deadline and len(steps) > 1:
            break
    return CostModel(Curve.of(steps), Curve.of(drafts))


def _sizes(most: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return [*sizes, most] if most > 1 else sizes


def _batch(rows: int, rows_per_seq: int, places: list[tuple[int, list[int]]], vocab_size: int, rng: random.Random) -> Batch:
    """A verify step of `rows` rows in as few sequences as hold them."""
    slices = []
    for (slot, blocks), begin in zip(places, range(0, rows, rows_per_seq), strict=False):
        count = min(rows_per_seq, rows - begin)
        ids = [rng.randrange(vocab_size) for _ in range(count)]
        slices.append(SequenceSlice(ids, 0, count, blocks, slot, (), 0, LogitRows.ALL))
    return Batch(StepKind.VERIFY, slices)


def _timed(action: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Mean seconds, without the warm-up, the fastest and the slowest run."""
    times = []
    for _ in range(REPEATS + 1):
        began = clock()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(clock() - began)
    return statistics.mean(sorted(times[1:])[1:-1])


def step_timer(path: str) -> Callable[[], float]:
    """How steps of a path are timed. A compiled step runs in the thread that calls it, so that thread's own time leaves out whatever
    else the machine does: beside a busy neighbour wall times are off by several times, and lengths chosen by them are arbitrary."""
    return time.thread_time if path == "compiled" else time.perf_counter


class StepWatch:
    """Times the two parts of a step without waiting for the device: events on a GPU, a timer on a CPU.

    The parts need not follow each other at once: the sampling of a step may wait for the host.
    """

    def __init__(self, device: str, timer: Callable[[], float] = time.perf_counter) -> None:
        self._timer = timer
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)] if device == "cuda" else []
        self._times = [0.0] * 3

    def now(self) -> float:
        """Seconds of the host's timer, for parts that end on the host."""
        return self._timer()

    def start(self) -> None:
        """The forward pass begins."""
        self._mark(0)

    def forward_enqueued(self) -> None:
        self._mark(1)

    def sampling(self) -> None:
        """The sampling begins."""
        self._mark(2)

    def stop(self) -> float:
        """Seconds of both parts. Call it when the sampled tokens are on the host: the events are over then."""
        if not self._events:
            return self._times[1] - self._times[0] + self._timer() - self._times[2]
        self._events[3].record()
        self._events[3].synchronize()
        return (self._events[0].elapsed_time(self._events[1]) + self._events[2].elapsed_time(self._events[3])) / 1e3

    def _mark(self, place: int) -> None:
        if self._events:
            self._events[place].record()
        else:
            self._times[place] = self._timer()
