"""How many drafts a step verifies: survival rates from confidences, and policies that turn them into lengths.

A policy must not look at drafts that it may still leave out: if the newest rates decided how many drafts are verified in all, whether
draft i is among them could depend on drafts behind it, and the output would be biased. So the budget of a step comes from earlier
rounds alone, and the newest rates only distribute it. Rates never rise inside a block, hence a draft's place in that ranking depends on
itself through its own prefix only.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.spec_costs import CostModel

MAX_CONFIDENCE = 60.0  # raw confidences are clamped to this size. Source: the release's draft head
MIN_TEMPERATURE = 1e-5
# With nothing to gain from drafts, one step in so many drafts all the same to notice when that changes. In between the question is
# asked again after 1, 2, 4 and then every HOLD steps: what is known of a sequence fades, and typical rates take its place.
PROBE_INTERVAL = 64
HOLD = 8
# Weight of old acceptance counts per verification: about the last thousand drafts of a place count.
_DECAY = 0.999
_FRESH = 0.01  # least share of the newest rates in the typical ones
_PRIOR = 8.0  # verifications that the confidences are trusted for before counts speak
# How far rates of one round carry over to the next is learnt from about the last hundred rounds; at first they are taken as they are,
# with the weight of two rounds.
_CARRY_DECAY = 0.99
_CARRY_PRIOR = 1.0


def survival_rates(confidence: Tensor, temperatures: Tensor) -> list[list[float]]:
    """Probability that a draft and all before it are kept. confidence: [B, N] fp32, raw. temperatures: [N]. Rows never rise."""
    # A few numbers on the host: numpy's calls cost a third of torch's.
    scaled = (confidence.numpy() / np.maximum(temperatures.numpy(), MIN_TEMPERATURE)).clip(-MAX_CONFIDENCE, MAX_CONFIDENCE)
    rates: list[list[float]] = (1.0 / (1.0 + np.exp(-scaled))).cumprod(-1).tolist()
    return rates


class LengthPolicy(Protocol):
    """Two calls per step: how many drafts in all, before drafting; then whose. `observe` tells how it went."""

    def budget(self, rates: list[list[float]], rooms: list[int]) -> int | None:
        """Drafts to verify in this step, from the rates of the round before (empty: unknown). None: all. 0: do not even draft."""

    def lengths(self, rates: list[list[float]], rooms: list[int], budget: int | None) -> list[int]:
        """Drafts of each sequence, from the newest rates; at most `rooms` each and `budget` in all."""

    def observe(self, rates: list[list[float]], verified: list[int], accepted: list[int]) -> None:
        """How many drafts of each sequence were verified and kept, and the rates that had been predicted for them."""

    def observe_cost(self, rows: int, num_seqs: int, forward_s: float, sampler_s: float) -> None:
        """How long the two parts of a step took."""


class FixedLength:
    """Verifies every draft that has room."""

    def budget(self, rates: list[list[float]], rooms: list[int]) -> int | None:
        return None

    def lengths(self, rates: list[list[float]], rooms: list[int], budget: int | None) -> list[int]:
        return rooms

    def observe(self, rates: list[list[float]], verified: list[int], accepted: list[int]) -> None:
        return None

    def observe_cost(self, rows: int, num_seqs: int, forward_s: float, sampler_s: float) -> None:
        return None


class ThroughputLength:
    """Verifies as many drafts as give the most tokens per second by the cost model, and drafts nothing when plain decoding gives more.

    Confidences are corrected by what came of them: per place, kept drafts over expected ones. The rates of a sequence's next round are
    its last ones drawn towards typical rates, as far as rounds that follow each other have differed.
    """

    def __init__(self, cost: CostModel, max_drafts: int) -> None:
        self.cost = cost
        self._expected = np.full(max_drafts, _PRIOR)
        self._kept = np.full(max_drafts, _PRIOR)
        self._typical = np.ones(max_drafts)
        self._rounds = 0
        self._products, self._squares = _CARRY_PRIOR, _CARRY_PRIOR
        self._asked: list[list[float]] = []
        self._skipped = 0

    @property
    def carry(self) -> float:
        """Slope of a round's rates over those of the round before, both against the typical ones. 0 to 1."""
        return min(1.0, max(0.0, self._products / self._squares))

    def budget(self, rates: list[list[float]], rooms: list[int]) -> int | None:
        """The total with the largest expected tokens / seconds, the smallest of equals."""
        self._asked = rates
        if self._skipped % HOLD and self._skipped & (self._skipped - 1):
            self._skipped += 1
            return 0
        num_seqs = len(rates)
        gains = self._gains(rates, rooms)
        step_s = self.cost.step_s(num_seqs + np.arange(len(gains) + 1), num_seqs)
        expected = num_seqs + np.concatenate(([0.0], np.cumsum(gains)))
        speed = expected / (step_s + self.cost.draft_s(num_seqs))
        best = int(speed.argmax())
        if best > 0 and speed[best] > expected[0] / step_s[0]:
            self._skipped = 0
            return best
        self._skipped += 1
        if self._skipped <= PROBE_INTERVAL:
            return 0
        self._skipped = 0
        return min(num_seqs, len(gains))

    def _gains(self, rates: list[list[float]], rooms: list[int]) -> np.ndarray:
        """Corrected rates of all drafts that have room, falling."""
        correction = np.clip(self._kept / self._expected, 0.0, 2.0)
        table = np.array([row or self._typical for row in rates])
        table = self._typical + self.carry ** (1 + self._skipped) * (table - self._typical)
        table = np.minimum.accumulate(np.minimum(table * correction, 1.0), axis=1)
        has_room = np.arange(table.shape[1]) < np.array(rooms)[:, None]
        return -np.sort(-table[has_room])

    def lengths(self, rates: list[list[float]], rooms: list[int], budget: int | None) -> list[int]:
        """The `budget` most likely drafts, ties to the lower sequence. The lengths sum to the budget while there is room."""
        table = np.array(rates)
        self._learn_carry(table)
        if budget is None or budget >= sum(rooms):
            return rooms
        has_room = np.arange(table.shape[1]) < np.array(rooms)[:, None]
        order = np.argsort(-np.where(has_room, table, -1.0), axis=None, kind="stable")[:budget]
        counts: list[int] = np.bincount(order // table.shape[1], minlength=len(rates)).tolist()
        return counts

    def _learn_carry(self, table: NDArray[np.float64]) -> None:
        """table: the newest rates of the sequences whose earlier ones `budget` was asked about."""
        for before, row in zip(self._asked, table, strict=False):  # nobody has asked: nothing to compare
            if before:
                earlier = np.array(before) - self._typical
                self._products = _CARRY_DECAY * self._products + float(earlier @ (row - self._typical))
                self._squares = _CARRY_DECAY * self._squares + float(earlier @ earlier)

    def observe(self, rates: list[list[float]], verified: list[int], accepted: list[int]) -> None:
        for row, length, kept in zip(rates, verified, accepted, strict=True):
            if length == 0:
                continue
            self._rounds += 1
            self._expected[:length] = self._expected[:length] * _DECAY + row[:length]
            self._kept[:length] *= _DECAY
            self._kept[:kept] += 1
            self._typical += max(_FRESH, 1.0 / (self._rounds + _PRIOR)) * (np.array(row) - self._typical)

    def observe_cost(self, rows: int, num_seqs: int, forward_s: float, sampler_s: float) -> None:
        self.cost.observe(rows, num_seqs, forward_s, sampler_s)
