"""Speculative rounds on a pretended machine: real length policies, made-up texts, confidences and costs. The same in every run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from engine.spec_costs import CostModel, Curve
from engine.spec_lengths import LengthPolicy, ThroughputLength

MAX_DRAFTS = 5
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
WINDOW = 128  # tokens that a draft reads
HICCUP = 1.5  # how much longer a step takes during which the machine does something else


@dataclass(frozen=True)
class Machine:
    """Seconds of its steps. Contexts and sampling add `more_s` per step, `more_per_seq_s`, since rows share what is read, and
    `more_per_draft_s`: the curves, measured on empty contexts and without sampling, know none of it. cold: what a step behind one of the
    other kind takes longer, as a share of a plain one. fill_s: of a draft, per token that a sequence has grown by without drafts."""

    base_s: float
    row_s: float
    more_per_seq_s: float
    more_per_draft_s: float
    draft_s: float
    draft_seq_s: float
    more_s: float = 0.0
    cold: float = 0.0
    fill_s: float = 0.0

    def curve_s(self, rows: int) -> float:
        return self.base_s + self.row_s * rows

    def step_s(self, num_seqs: int, num_drafts: int) -> float:
        return self.curve_s(num_seqs + num_drafts) + self.more_s + self.more_per_seq_s * num_seqs + self.more_per_draft_s * num_drafts

    def propose_s(self, num_seqs: int) -> float:
        return self.draft_s + self.draft_seq_s * num_seqs

    def chosen_lengths(self, noise: float, rng: random.Random) -> ThroughputLength:
        """noise: standard deviation of the measured points, as a share."""

        def measured(seconds: Callable[[int], float]) -> Curve:
            return Curve.of([(size, seconds(size) * max(0.5, rng.gauss(1, noise))) for size in SIZES])

        return ThroughputLength(CostModel(measured(self.curve_s), measured(self.propose_s)), MAX_DRAFTS)


@dataclass
class Text:
    """A sequence that goes well in stretches. `round` gives survival rates of the drafts behind its last token and how many are right."""

    rng: random.Random
    left: int
    easy: bool = True
    rates: list[float] | None = None

    def round(self) -> tuple[list[float], int]:
        if self.rng.random() < 0.2:
            self.easy = not self.easy
        chances = [self.rng.uniform(0.95, 1.0) if self.easy else self.rng.uniform(0.3, 0.9) for _ in range(MAX_DRAFTS)]
        right = next((i for i, chance in enumerate(chances) if self.rng.random() >= chance), MAX_DRAFTS)
        return [*accumulate(chances, mul)], right


def tokens_per_second(
    policy: LengthPolicy, machine: Machine, streams: int, noise: float = 0.0, num_texts: int = 200, seed: int = 1, hiccups: float = 0.0
) -> float:
    """Decode texts, `streams` at a time. noise: standard deviation of what steps take, as a share. hiccups: share of steps
    and drafts that take `HICCUP` times as long."""
    rng, luck = random.Random(seed), random.Random(seed + 1)
    waiting = [Text(random.Random(f"{seed}/{i}"), rng.randint(10, 60)) for i in range(num_texts)]
    active: list[Text] = []
    tokens, seconds = 0, 0.0
    verified, paused = False, 0

    def took(exact_s: float) -> float:
        return exact_s * max(0.5, luck.gauss(1, noise)) * (HICCUP if luck.random() < hiccups else 1.0)

    while waiting or active:
        while waiting and len(active) < streams:
            active.append(waiting.pop())
        count, rooms = len(active), [MAX_DRAFTS] * len(active)
        budget = policy.budget([text.rates or [] for text in active], rooms)
        lengths, right = [0] * count, [0] * count
        if budget != 0:
            rounds = [text.round() for text in active]
            for text, (rates, _) in zip(active, rounds, strict=True):
                text.rates = rates
            lengths, right = policy.lengths([rates for rates, _ in rounds], rooms, budget), [kept for _, kept in rounds]
            draft_s = took(machine.propose_s(count)) + machine.fill_s * count * min(paused, WINDOW)
            paused = 0
            policy.observe_draft(count, draft_s)
            seconds += draft_s
        kept = [min(length, good) for length, good in zip(lengths, right, strict=True)]
        step_s = took(machine.step_s(count, sum(lengths)))
        if verified != any(lengths):
            step_s += machine.cold * machine.step_s(count, 0)
        verified, paused = any(lengths), paused + 1
        if budget != 0:
            policy.observe([text.rates or [] for text in active], lengths, kept)
        policy.observe_cost(count + sum(lengths), count, step_s)
        seconds += step_s
        for text, more in zip(active, kept, strict=True):
            tokens += min(text.left, more + 1)
            text.left -= more + 1
        active = [text for text in active if text.left > 0]
    return tokens / seconds
