"""What a decode or verify step costs: a curve measured at start-up, corrected by the steps that are really taken."""

from __future__ import annotations

import random
import statistics
import time
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.models.draft import DraftSlice

RESIDUALS = 5000  # steps that the context slope remembers
SLOPE_INTERVAL = 100  # steps between two looks at them
LEAST_RESIDUALS = 10  # of one bucket, before it has a say
SAMPLER_TIMES = 9
LEAST_SAMPLER_TIMES = 5
REPEATS = 5  # timed runs of one point, of which the fastest and the slowest are dropped
MEASURE_S = 0.5  # start-up time for a curve, which clients wait for; points that do not fit are extrapolated


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, ascending. Between points it is a line; before the first it is flat, behind the last the last slope goes on."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: int) -> float:
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) < 2 or size <= sizes[0]:
            return seconds[0]
        right = min(bisect_left(sizes, size), len(sizes) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
        return seconds[right] + slope * (size - sizes[right])

    @staticmethod
    def of(points: list[tuple[int, float]]) -> Curve:
        """Points in ascending order. More work is never modelled as faster: noise on a busy machine would make lengths jump."""
        return Curve(tuple(size for size, _ in points), tuple(accumulate((second for _, second in points), max)))


class CostModel:
    """time(rows) = curve + slope * rows + sampler. The slope stands for contexts longer than those of the measurement. A draft costs its
    curve times what the last ones took over it: the curve is measured on empty windows and without the host's share.

    It is asked and told about every step, so everything here is a few operations on Python's own numbers: on a small model a handful of
    calls of numpy takes as long as half a layer.
    """

    def __init__(self, steps: Curve, drafts: Curve) -> None:
        """steps: by rows of a verify step. drafts: by sequences."""
        self._steps, self._drafts = steps, drafts
        self._draft_ratios: deque[float] = deque(maxlen=SAMPLER_TIMES)
        self._draft_factor = 1.0
        self._residuals: deque[tuple[int, float]] = deque()
        self._by_size: dict[int, list[float]] = defaultdict(list)  # rows -> the same residuals in ascending order
        self._sampler: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLER_TIMES))
        self._slope, self._fresh = 0.0, 0
        self._curve: list[float] = []  # seconds by rows, as far as anybody has asked

    def step_s(self, first: int, count: int, num_seqs: int) -> list[float]:
        """Seconds of steps with `first`, `first` + 1, ... rows in all, `count` of them, for the same sequences."""
        curve, slope, sampler_s = self._seconds(first + count - 1), self._slope, self.sampler_s(num_seqs)
        return [max(curve[rows] + slope * rows + sampler_s, 1e-9) for rows in range(first, first + count)]

    def draft_s(self, num_seqs: int) -> float:
        return self._drafts(num_seqs) * self._draft_factor

    def sampler_s(self, num_seqs: int) -> float:
        """Median of the last samplings of so many sequences, else of all, else 0."""
        own = self._sampler.get(num_seqs, ())
        if len(own) >= LEAST_SAMPLER_TIMES:
            return statistics.median(own)
        times = [second for seconds in self._sampler.values() for second in seconds]
        return statistics.median(times) if len(times) >= LEAST_SAMPLER_TIMES else 0.0

    @property
    def slope(self) -> float:
        """Seconds per row beyond the curve: the median over sizes of their median residuals per row, not below 0."""
        return self._slope

    def observe(self, rows: int, num_seqs: int, forward_s: float, sampler_s: float) -> None:
        """A step that was taken."""
        self._sampler[num_seqs].append(sampler_s)
        residual = (forward_s - self._seconds(rows)[rows]) / rows
        self._residuals.append((rows, residual))
        insort(self._by_size[rows], residual)
        if len(self._residuals) > RESIDUALS:
            size, oldest = self._residuals.popleft()
            own = self._by_size[size]
            del own[bisect_left(own, oldest)]
        self._fresh += 1
        if self._fresh >= (SLOPE_INTERVAL if len(self._residuals) >= SLOPE_INTERVAL else LEAST_RESIDUALS):
            self._fresh = 0
            self._slope = self._median_slope()

    def observe_draft(self, num_seqs: int, seconds: float) -> None:
        """A draft that was made, of sequences that the step before had drafted for too."""
        self._draft_ratios.append(seconds / max(self._drafts(num_seqs), 1e-9))
        self._draft_factor = statistics.median(self._draft_ratios)

    def forget_drafts(self) -> None:
        """What drafts took was long ago: the next one alone says what they cost now."""
        self._draft_ratios.clear()

    def _seconds(self, rows: int) -> list[float]:
        """The curve's seconds by rows, up to `rows` at least."""
        self._curve.extend(self._steps(size) for size in range(len(self._curve), rows + 1))
        return self._curve

    def _median_slope(self) -> float:
        # statistics.median would sort what is sorted already.
        medians = [(own[(len(own) - 1) // 2] + own[len(own) // 2]) / 2 for own in self._by_size.values() if len(own) >= LEAST_RESIDUALS]
        return max(0.0, statistics.median(medians)) if medians else 0.0


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

    def stop(self) -> tuple[float, float]:
        """Seconds of the forward and of the sampling. Call it when the sampled tokens are on the host: the events are over then."""
        if not self._events:
            return self._times[1] - self._times[0], self._timer() - self._times[2]
        self._events[3].record()
        self._events[3].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3, self._events[2].elapsed_time(self._events[3]) / 1e3

    def _mark(self, place: int) -> None:
        if self._events:
            self._events[place].record()
        else:
            self._times[place] = self._timer()
