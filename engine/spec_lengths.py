"""How many drafts a step verifies: survival rates from confidences, and policies that turn them into lengths.

A policy must not look at drafts that it may still leave out: if the newest rates decided how many drafts are verified in all, whether
draft i is among them could depend on drafts behind it, and the output would be biased. So the budget of a step comes from earlier
rounds alone, and the newest rates only distribute it. Rates never rise inside a block, hence a draft's place in that ranking depends on
itself through its own prefix only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from operator import itemgetter
from typing import Protocol

from engine.spec_costs import CostModel, size_class
from engine.spec_modes import Mode

MAX_CONFIDENCE = 60.0  # raw confidences are clamped to this size. Source: the release's draft head
MIN_TEMPERATURE = 1e-5
# Weight of old acceptance counts per verification: about the last thousand drafts of a place count.
_DECAY = 0.999
_FRESH = 0.01  # least share of the newest rates in the typical ones
_PRIOR = 8.0  # verifications that the confidences are trusted for before counts speak
# How far rates of one round carry over to the next is learnt from about the last hundred rounds; at first they are taken as they are,
# with the weight of two rounds.
_CARRY_DECAY = 0.99
_CARRY_PRIOR = 1.0


def survival_rates(confidence: list[list[float]], temperatures: list[float]) -> list[list[float]]:
    """Probability that a draft and all before it are kept. confidence: [B][N], raw. temperatures: [N], positive. Rows never rise."""
    rates: list[list[float]] = []
    for row in confidence:
        rate, own = 1.0, []
        for raw, temperature in zip(row, temperatures, strict=True):
            rate /= 1.0 + math.exp(min(max(-raw / temperature, -MAX_CONFIDENCE), MAX_CONFIDENCE))
            own.append(rate)
        rates.append(own)
    return rates


class LengthPolicy(Protocol):
    """Two calls per step: how many drafts in all, before drafting; then whose. `observe` tells how it went."""

    def rests(self, num_seqs: int) -> bool:
        """Whether this step drafts nothing, known without a look at its sequences: nothing else is asked about it then."""

    def budget(self, rates: list[list[float]], rooms: list[int]) -> int | None:
        """Drafts to verify in this step, from the rates of the round before (empty: unknown). None: all. 0: do not even draft."""

    def lengths(self, rates: list[list[float]], rooms: list[int], budget: int | None) -> list[int]:
        """Drafts of each sequence, from the newest rates; at most `rooms` each and `budget` in all."""

    def observe(self, rates: list[list[float]], verified: list[int], accepted: list[int]) -> None:
        """How many drafts of each sequence were verified and kept, and the rates that had been predicted for them."""

    def observe_cost(self, rows: int, num_seqs: int, seconds: float) -> None:
        """How long a step took, its forward pass and the sampling."""

    def observe_draft(self, num_seqs: int, seconds: float) -> None:
        """How long it took to propose, after a budget other than 0."""


class FixedLength:
    """Verifies every draft that has room."""

    def rests(self, num_seqs: int) -> bool:
        return False

    def budget(self, rates: list[list[float]], rooms: list[int]) -> int | None:
        return None

    def lengths(self, rates: list[list[float]], rooms: list[int], budget: int | None) -> list[int]:
        return rooms

    def observe(self, rates: list[list[float]], verified: list[int], accepted: list[int]) -> None:
        return None

    def observe_cost(self, rows: int, num_seqs: int, seconds: float) -> None:
        return None

    def observe_draft(self, num_seqs: int, seconds: float) -> None:
        return None


class ThroughputLength:
    """Verifies as many drafts as give the most tokens per second by the cost model, and drafts nothing when plain decoding gives more.

    Confidences are corrected by what came of them: per place, kept drafts over expected ones. The rates of a sequence's next round are
    its last ones drawn towards typical rates, as far as rounds that follow each other have differed.
    """

    def __init__(self, cost: CostModel, max_drafts: int) -> None:
        self.cost = cost
        self._expected = [_PRIOR] * max_drafts
        self._kept = [_PRIOR] * max_drafts
        self._typical = [1.0] * max_drafts
        self._rounds = 0
        self._products, self._squares = _CARRY_PRIOR, _CARRY_PRIOR
        self._correction = [1.0] * max_drafts
        self._asked: list[list[float]] = []
        self._modes: dict[int, Mode] = defaultdict(Mode)  # by `size_class`
        self._skipped = 0  # steps since the last one that drafted
        self._steady = False  # whether the step before has drafted as well

    @property
    def carry(self) -> float:
        """Slope of a round's rates over those of the round before, both against the typical ones. 0 to 1."""
        return min(1.0, max(0.0, self._products / self._squares))

    def rests(self, num_seqs: int) -> bool:
        mode = self._modes[size_class(num_seqs)]
        if mode.drafts or not mode.holds():
            return False
        self._skipped += 1
        return True

    def budget(self, rates: list[list[float]], rooms: list[int]) -> int | None:
        """The total with the largest expected tokens / seconds, the smallest of equals; 0 where plain steps give more. On trial of either
        way (`Mode`) the other one."""
        self._asked, num_seqs = rates, len(rates)
        if self.rests(num_seqs):
            return 0
        mode = self._modes[size_class(num_seqs)]
        if not mode.holds():
            mode.budget, tokens, seconds = self._best(num_seqs, self._gains(rates, rooms))
            mode.decide((num_seqs, self.cost.plain_s(num_seqs)), (tokens, seconds))
            if mode.on_trial:
                self.cost.forget(num_seqs, drafts=bool(mode.drafts))
        if not mode.drafts:
            self._skipped += 1
            return 0
        self._steady, self._skipped = self._skipped == 0, 0
        return mode.budget

    def _best(self, num_seqs: int, gains: list[float]) -> tuple[int, float, float]:
        """The number of drafts that gives the most tokens per second, at least one if there is room; those tokens and seconds, drafting
        included."""
        draft_s, expected = self.cost.draft_s(num_seqs), float(num_seqs)
        best, most = (0, expected, math.inf), 0.0
        for count, (gain, verify_s) in enumerate(zip(gains, self.cost.verify_s(num_seqs, len(gains)), strict=True), 1):
            expected += gain
            seconds = verify_s + draft_s
            if expected > most * seconds:
                best, most = (count, expected, seconds), expected / seconds
        return best

    def _gains(self, rates: list[list[float]], rooms: list[int]) -> list[float]:
        """Corrected rates of all drafts that have room, falling."""
        typical, correction, carried = self._typical, self._correction, self.carry ** (1 + self._skipped)
        gains: list[float] = []
        for row, room in zip(rates, rooms, strict=True):
            lowest = 1.0
            for middle, rate, factor in zip(typical[:room], row or typical, correction, strict=False):
                expected = (middle + carried * (rate - middle)) * factor
                lowest = expected if expected < lowest else lowest
                gains.append(lowest)
        gains.sort(reverse=True)
        return gains

    def lengths(self, rates: list[list[float]], rooms: list[int], budget: int | None) -> list[int]:
        """The `budget` most likely drafts, ties to the lower sequence. The lengths sum to the budget while there is room."""
        self._learn_carry(rates)
        if budget is None or budget >= sum(rooms):
            return rooms
        ranked = [(rate, i) for i, (row, room) in enumerate(zip(rates, rooms, strict=True)) for rate in row[:room]]
        ranked.sort(key=itemgetter(0), reverse=True)  # equals stay in their order
        counts = [0] * len(rates)
        for _, i in ranked[:budget]:
            counts[i] += 1
        return counts

    def _learn_carry(self, rates: list[list[float]]) -> None:
        """rates: the newest of the sequences whose earlier ones `budget` was asked about."""
        for before, row in zip(self._asked, rates, strict=False):  # nobody has asked: nothing to compare
            if before:
                products = squares = 0.0
                for earlier, later, middle in zip(before, row, self._typical, strict=True):
                    products += (earlier - middle) * (later - middle)
                    squares += (earlier - middle) ** 2
                self._products = _CARRY_DECAY * self._products + products
                self._squares = _CARRY_DECAY * self._squares + squares

    def observe(self, rates: list[list[float]], verified: list[int], accepted: list[int]) -> None:
        expected, counts, typical, correction = self._expected, self._kept, self._typical, self._correction
        for row, length, kept in zip(rates, verified, accepted, strict=True):
            if length == 0:
                continue
            self._rounds += 1
            share = max(_FRESH, 1.0 / (self._rounds + _PRIOR))
            for place, rate in enumerate(row):
                typical[place] += share * (rate - typical[place])
                if place < length:
                    expected[place] = predicted = expected[place] * _DECAY + rate
                    counts[place] = right = counts[place] * _DECAY + (place < kept)
                    correction[place] = right / predicted if right < 2.0 * predicted else 2.0

    def observe_cost(self, rows: int, num_seqs: int, seconds: float) -> None:
        self.cost.observe(rows, num_seqs, seconds)

    def observe_draft(self, num_seqs: int, seconds: float) -> None:
        # The first draft after a pause fills the windows of all that was decoded meanwhile.
        if self._steady:
            self.cost.observe_draft(num_seqs, seconds)
