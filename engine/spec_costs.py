"""What a decode or verify step costs: curves measured at start-up (`engine/step_timing.py`), corrected by the steps that are taken."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

RECENT_STEPS = 15  # steps of a kind that say what it takes beyond the curve
RECENT_DRAFTS = 9
FORGET_PLAIN = 256  # verify steps in a row after which nobody knows what a plain one takes
LEAST_S = 1e-9  # no step takes less, whatever noise says


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, ascending. Between points it is a line; before the first it is flat, behind the last the last slope goes on.

    Recorded steps have a few sizes and are padded up to them, yet a line is nearer to their times than stairs: padding rows are all alike,
    and touch no more experts than one row.
    """

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


class RecentMedian:
    """Median of the last few values; None when there are none."""

    def __init__(self, keep: int) -> None:
        self.values: deque[float] = deque(maxlen=keep)
        self.median: float | None = None

    def add(self, value: float) -> float:
        self.values.append(value)
        self.median = median = _median(self.values)
        return median

    def clear(self) -> None:
        self.values.clear()
        self.median = None


def _median(values: Collection[float]) -> float:
    """0 for none. The library's own checks what it is given, which takes longer than to sort it."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2


class Beyond:
    """What the last steps of about the same number of sequences took beyond the curves."""

    def __init__(self) -> None:
        self.draft_factor = 1.0
        self._draft_ratio = RecentMedian(RECENT_DRAFTS)
        self._per_seq = RecentMedian(RECENT_STEPS)
        self._verified: deque[tuple[float, int, int]] = deque(maxlen=RECENT_STEPS)  # seconds beyond the curve, sequences, drafts
        self._since_plain = 0  # verify steps since the last plain one
        self._shares: tuple[float, float] | None = None  # None: to be found anew

    @property
    def shares(self) -> tuple[float, float]:
        """Seconds per sequence and per draft. Without plain steps to tell, a row of a verify step says both; without verify steps a draft
        is believed to add nothing."""
        if self._shares is None:
            per_seq_s = self._per_seq.median
            if per_seq_s is None:
                per_seq_s = _median([beyond_s / (seqs + drafts) for beyond_s, seqs, drafts in self._verified])
            per_draft_s = _median([(beyond_s - per_seq_s * seqs) / drafts for beyond_s, seqs, drafts in self._verified])
            self._shares = per_seq_s, per_draft_s
        return self._shares

    def observe(self, beyond_s: float, num_seqs: int, num_drafts: int) -> None:
        self._shares = None
        if not num_drafts:
            # The first plain step behind a verify step finds other things in the caches: it takes up to twice as long as the next one.
            if self._since_plain == 0:
                self._per_seq.add(beyond_s / num_seqs)
            self._since_plain = 0
            return
        self._verified.append((beyond_s, num_seqs, num_drafts))
        self._since_plain += 1
        if self._since_plain % FORGET_PLAIN == 0:
            self._per_seq.clear()

    def observe_draft(self, ratio: float) -> None:
        self.draft_factor = self._draft_ratio.add(ratio)

    def forget_drafts(self) -> None:
        self._draft_ratio.clear()
        self._verified.clear()
        self._shares = None


class CostModel:
    """Seconds of the steps that a length policy chooses between, for n sequences with k drafts in all:

        plain(n)     = curve(n)     + a * n
        verify(n, k) = curve(n + k) + a * n + b * k
        draft(n)     = drafts(n) * c

    The curves are measured at start-up, on empty contexts, with nothing in between and without sampling; a, b and c are medians over the
    last steps of their own kind with about as many sequences, up to a factor of 2. A sequence costs `a`, mostly for reading its context,
    which all its rows share, and a draft less; where tokens are drawn, both cost that as well. With one slope over all rows, or one
    sampling time for all steps, one of the two kinds looks cheaper than it is and the other dearer, and since only steps that are taken
    correct it, it stays so. A kind that has not been taken for long is believed to be cheap: it is tried again.

    It is asked and told about every step, so everything here is a few operations on Python's own numbers: on a small model a handful of
    calls of numpy takes as long as half a layer.
    """

    def __init__(self, steps: Curve, drafts: Curve) -> None:
        """steps: by rows of a step. drafts: by sequences."""
        self._steps, self._drafts = steps, drafts
        self._beyond: dict[int, Beyond] = defaultdict(Beyond)  # binary digits of the number of sequences -> what such steps showed
        self._curve: list[float] = []  # seconds by rows, as far as anybody has asked

    def plain_s(self, num_seqs: int) -> float:
        """Seconds of a step that verifies nothing."""
        per_seq_s, _ = self.shares(num_seqs)
        return max(self._seconds(num_seqs)[num_seqs] + per_seq_s * num_seqs, LEAST_S)

    def verify_s(self, num_seqs: int, most: int) -> list[float]:
        """Seconds of steps that verify 1, 2, ..., `most` drafts in all."""
        curve, (per_seq_s, per_draft_s) = self._seconds(num_seqs + most), self.shares(num_seqs)
        fixed_s = per_seq_s * num_seqs
        return [max(curve[num_seqs + count] + fixed_s + per_draft_s * count, LEAST_S) for count in range(1, most + 1)]

    def draft_s(self, num_seqs: int) -> float:
        return self._drafts(num_seqs) * self._at(num_seqs).draft_factor

    def shares(self, num_seqs: int) -> tuple[float, float]:
        """`a` and `b`."""
        return self._at(num_seqs).shares

    def observe(self, rows: int, num_seqs: int, seconds: float) -> None:
        """A step that was taken: its forward pass and the sampling."""
        self._at(num_seqs).observe(seconds - self._seconds(rows)[rows], num_seqs, rows - num_seqs)

    def observe_draft(self, num_seqs: int, seconds: float) -> None:
        """A draft that was made, of sequences that the step before had drafted for too."""
        self._at(num_seqs).observe_draft(seconds / max(self._drafts(num_seqs), LEAST_S))

    def forget_drafts(self, num_seqs: int) -> None:
        """What drafts and their verification took was long ago: the next ones alone say what they cost now."""
        self._at(num_seqs).forget_drafts()

    def _at(self, num_seqs: int) -> Beyond:
        return self._beyond[num_seqs.bit_length()]

    def _seconds(self, rows: int) -> list[float]:
        """The curve's seconds by rows, up to `rows` at least."""
        self._curve.extend(self._steps(size) for size in range(len(self._curve), rows + 1))
        return self._curve
