"""What a decode or verify step costs: curves measured at start-up (`engine/step_timing.py`), corrected by the steps that are taken."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate

RECENT = 15  # steps of a kind that say what it takes beyond the curve
ENOUGH = 3  # of them before they are believed: the median of fewer is any one of them
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


def _median(values: Collection[float]) -> float:
    """0 for none. The library's own checks what it is given, which takes longer than to sort it."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2


class Beyond:
    """What the last steps of about the same number of sequences took beyond the curves. Medians are found when somebody asks."""

    def __init__(self) -> None:
        self._per_seq: deque[float] = deque(maxlen=RECENT)  # seconds of plain steps
        self._verified: deque[tuple[float, int, int]] = deque(maxlen=RECENT)  # seconds, sequences, drafts
        self._draft_ratios: deque[float] = deque(maxlen=RECENT)
        self._known: tuple[float, float, float] | None = None

    @property
    def known(self) -> tuple[float, float, float]:
        """Seconds per sequence and per draft, and the factor of drafts. Without plain steps to tell, a row of a verify step says both;
        without verify steps a draft is believed to add nothing."""
        if self._known is None:
            verified = self._verified if len(self._verified) >= ENOUGH else ()
            if len(self._per_seq) >= ENOUGH:
                per_seq_s = _median(self._per_seq)
            else:
                per_seq_s = _median([beyond_s / (seqs + drafts) for beyond_s, seqs, drafts in verified])
            per_draft_s = _median([(beyond_s - per_seq_s * seqs) / drafts for beyond_s, seqs, drafts in verified])
            factor = _median(self._draft_ratios) if len(self._draft_ratios) >= ENOUGH else 1.0
            self._known = per_seq_s, per_draft_s, factor
        return self._known

    def observe(self, beyond_s: float, num_seqs: int, num_drafts: int) -> None:
        if num_drafts:
            self._verified.append((beyond_s, num_seqs, num_drafts))
        else:
            self._per_seq.append(beyond_s / num_seqs)
        self._known = None

    def observe_draft(self, ratio: float) -> None:
        self._draft_ratios.append(ratio)
        self._known = None

    def forget(self, drafts: bool) -> None:
        if drafts:
            self._verified.clear()
            self._draft_ratios.clear()
        else:
            self._per_seq.clear()
        self._known = None


def size_class(num_seqs: int) -> int:
    """Numbers of sequences whose steps say something about each other: 1, 2, 3 to 5, 6 to 10, 11 to 21, ... The usual limits, powers of
    two, lie in the middle."""
    return (num_seqs * 3 // 2).bit_length()


class CostModel:
    """Seconds of the steps that a length policy chooses between, for n sequences with k drafts in all:

        plain(n)     = curve(n)     + a * n
        verify(n, k) = curve(n + k) + a * n + b * k
        draft(n)     = drafts(n) * c

    The curves are measured at start-up, on empty contexts, with nothing in between and without sampling; a, b and c are medians over the
    last steps of their own kind with about as many sequences (`size_class`). A sequence costs `a`, mostly for reading its context,
    which all its rows share, and a draft less; where tokens are drawn, both cost that as well. With one slope over all rows, or one
    sampling time for all steps, one of the two kinds looks cheaper than it is and the other dearer, and since only steps that are taken
    correct it, it stays so. The first step behind one of the other kind says nothing: it finds other things in the caches and takes up
    to twice as long as the next one.

    It is asked and told about every step, so everything here is a few operations on Python's own numbers: on a small model a handful of
    calls of numpy takes as long as half a layer.
    """

    def __init__(self, steps: Curve, drafts: Curve) -> None:
        """steps: by rows of a step. drafts: by sequences."""
        self._steps, self._drafts = steps, drafts
        self._beyond: dict[int, Beyond] = defaultdict(Beyond)  # by `size_class`
        self._curve: list[float] = []  # seconds by rows, as far as anybody has asked
        self._verifies: bool | None = None  # what the last step did

    def plain_s(self, num_seqs: int) -> float:
        """Seconds of a step that verifies nothing."""
        per_seq_s, _, _ = self._at(num_seqs).known
        return max(self._seconds(num_seqs)[num_seqs] + per_seq_s * num_seqs, LEAST_S)

    def verify_s(self, num_seqs: int, most: int) -> list[float]:
        """Seconds of steps that verify 1, 2, ..., `most` drafts in all."""
        curve, (per_seq_s, per_draft_s, _) = self._seconds(num_seqs + most), self._at(num_seqs).known
        fixed_s = per_seq_s * num_seqs
        seconds = [curve[num_seqs + count] + fixed_s + per_draft_s * count for count in range(1, most + 1)]
        return seconds if min(seconds, default=LEAST_S) >= LEAST_S else [max(one, LEAST_S) for one in seconds]

    def draft_s(self, num_seqs: int) -> float:
        _, _, factor = self._at(num_seqs).known
        return self._drafts(num_seqs) * factor

    def observe(self, rows: int, num_seqs: int, seconds: float) -> None:
        """A step that was taken: its forward pass and the sampling."""
        verifies = rows > num_seqs
        if verifies is self._verifies:
            self._at(num_seqs).observe(seconds - self._seconds(rows)[rows], num_seqs, rows - num_seqs)
        self._verifies = verifies

    def observe_draft(self, num_seqs: int, seconds: float) -> None:
        """A draft that was made, of sequences that the step before had drafted for too."""
        self._at(num_seqs).observe_draft(seconds / max(self._drafts(num_seqs), LEAST_S))

    def forget(self, num_seqs: int, drafts: bool) -> None:
        """What steps that draft, or those that do not, took was long ago: the next ones alone say what they take now."""
        self._at(num_seqs).forget(drafts)

    def _at(self, num_seqs: int) -> Beyond:
        return self._beyond[size_class(num_seqs)]

    def _seconds(self, rows: int) -> list[float]:
        """The curve's seconds by rows, up to `rows` at least."""
        if rows >= len(self._curve):
            self._curve.extend(self._steps(size) for size in range(len(self._curve), rows + 1))
        return self._curve
