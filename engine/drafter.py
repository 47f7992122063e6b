"""Drafts of the running sequences: where they come from, how they are drawn, how many of them a step verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.distribution import probabilities
from engine.draws import fixed_point, inverse_cdf, race
from engine.models.draft import Choose, DraftSlice
from engine.random_keys import MASK64, draws53, race_keys
from engine.request import Sequence
from engine.spec_decode import NO_PROPOSALS, Proposals
from engine.spec_lengths import MIN_TEMPERATURE, FixedLength, LengthPolicy, survival_rates

# Draws of drafts by rejection must be independent of all others, also of the last round's draw for the same position: the number of
# drafts that are verified may depend on that one. So the seed moves with the place where the block starts.
_SEED_STEP = 1_000_000_007


@dataclass(frozen=True, slots=True)
class DraftPoint:
    """Where drafts of a sequence begin: behind `token_id`, the last of its `length` tokens. The sequence itself may not know it yet."""

    seq: Sequence
    token_id: int
    length: int


class DrafterLike(Protocol):
    """Proposes tokens that a verify step then checks."""

    max_drafts: int
    policy: LengthPolicy
    proposals: Proposals

    def propose(self, points: list[DraftPoint], rooms: list[int]) -> list[list[int]]:
        """Drafts for each sequence, at most as many as its room; an empty list where none are worth it."""

    def observe(self, seqs: list[Sequence], drafts: list[list[int]], kept: list[list[int]]) -> None:
        """What became of the drafts: `kept` holds the tokens that a verification emitted for each sequence."""


class DraftingRunner(Protocol):
    """The part of a model runner that drafts."""

    def draft(self, slices: list[DraftSlice], choose: Choose | None = None) -> Any: ...

    def draft_greedy(self, slices: list[DraftSlice]) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and raw confidences of every slice's block."""


class Recorder(Protocol):
    """Somebody who studies drafts, see `engine/spec_stats.py`."""

    def on_draft(self, seqs: list[Sequence], confidence: list[list[float]]) -> None: ...

    def on_verified(self, seqs: list[Sequence], verified: list[int], accepted: list[int]) -> None: ...


class Drafter:
    """Proposes tokens for running sequences, in the decode step that verifies them.

    Nothing is kept from step to step but the survival rates of a sequence's last round (`Sequence.draft_rates`), so preemption, abort
    and prefill in between need no care: the draft windows are filled by every forward step.
    """

    def __init__(
        self,
        runner: DraftingRunner,
        max_drafts: int,
        end_token_ids: frozenset[int],
        policy: LengthPolicy | None = None,
        temperatures: list[float] | None = None,
    ) -> None:
        """temperatures: calibration of the confidences, one per place of the block; 1 is none."""
        self.max_drafts = max_drafts
        self.policy: LengthPolicy = policy or FixedLength()
        self.proposals: Proposals = NO_PROPOSALS
        self.recorder: Recorder | None = None
        self._runner = runner
        self._end_token_ids = end_token_ids
        self._temperatures = [max(temperature, MIN_TEMPERATURE) for temperature in temperatures or [1.0] * max_drafts]

    def propose(self, points: list[DraftPoint], rooms: list[int]) -> list[list[int]]:
        """Drafts for each sequence, at most `rooms[i]`. The budget comes from earlier rounds, its distribution from this one."""
        self.proposals = NO_PROPOSALS
        seqs = [point.seq for point in points]
        budget = self.policy.budget([seq.draft_rates for seq in seqs], rooms)
        if budget == 0:
            return [[] for _ in seqs]
        sampling = _DraftSampling.of(points, self.max_drafts)
        slices = [DraftSlice(point.token_id, point.length - 2, point.seq.state_slot) for point in points]
        if sampling is None:
            drafts, confidence = self._runner.draft_greedy(slices)
        else:
            output = self._runner.draft(slices, sampling.choose)
            drafts, confidence = output.token_ids.tolist(), output.confidence.tolist()
            self.proposals = sampling.proposals
        drafts, confidence = [row[: self.max_drafts] for row in drafts], [row[: self.max_drafts] for row in confidence]
        if self.recorder is not None:
            self.recorder.on_draft(seqs, confidence)
        rates = survival_rates(confidence, self._temperatures)
        rooms = [min(room, self._useful(seq, ids)) for seq, ids, room in zip(seqs, drafts, rooms, strict=True)]
        for seq, row in zip(seqs, rates, strict=True):
            seq.draft_rates = row
        lengths = self.policy.lengths(rates, rooms, budget)
        return [ids[:length] for ids, length in zip(drafts, lengths, strict=True)]

    def observe(self, seqs: list[Sequence], drafts: list[list[int]], kept: list[list[int]]) -> None:
        """What became of the drafts: `kept` holds the tokens that a verification emitted for each sequence."""
        verified, accepted = [len(ids) for ids in drafts], [len(tokens) - 1 for tokens in kept]
        self.policy.observe([seq.draft_rates for seq in seqs], verified, accepted)
        if self.recorder is not None:
            self.recorder.on_verified(seqs, verified, accepted)

    def _useful(self, seq: Sequence, drafts: list[int]) -> int:
        """Drafts up to the first that would end the sequence: what follows it is never kept."""
        params = seq.request.params
        for place, token in enumerate(drafts):
            if (token in self._end_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
                return place + 1
        return len(drafts)


class _DraftSampling:
    """Draws the drafts of sampled sequences from the drafter's distribution after their own temperature and filters."""

    def __init__(self, points: list[DraftPoint], max_drafts: int, sampled: list[int]) -> None:
        self._max_drafts = max_drafts
        self._sampled = sampled
        self._everyone = len(sampled) == len(points)
        chosen = [points[i] for i in sampled]
        self._params = [point.seq.request.params for point in chosen]
        self._coupled = [k for k, params in enumerate(self._params) if params.seed is not None]
        self._free = [k for k, params in enumerate(self._params) if params.seed is None]
        # Random numbers of all places at once, [N, rows]: a call costs as much as the numbers.
        free, coupled = [chosen[k] for k in self._free], [chosen[k] for k in self._coupled]
        keys = race_keys([point.seq.seed for point in coupled] * max_drafts, _positions(coupled, max_drafts))
        seeds = [(point.seq.seed + _SEED_STEP * point.length) & MASK64 for point in free]
        self._keys = keys.reshape(max_drafts, len(coupled))
        self._numbers = draws53(seeds * max_drafts, _positions(free, max_drafts)).reshape(max_drafts, len(free))
        self.proposals = Proposals({chosen[k].seq.seq_id: row for row, k in enumerate(self._free)}, [])

    @staticmethod
    def of(points: list[DraftPoint], max_drafts: int) -> _DraftSampling | None:
        """None when all sequences are greedy."""
        sampled = [i for i, point in enumerate(points) if point.seq.request.params.temperature > 0.0]
        return _DraftSampling(points, max_drafts, sampled) if sampled else None

    def choose(self, place: int, logits: Tensor) -> Tensor:
        """logits: [B, V]. Sequences with a seed run the race that the target will run; the others draw numbers of their own."""
        if place >= self._max_drafts:
            return logits.argmax(dim=-1)
        device = logits.device
        index = None if self._everyone else torch.tensor(self._sampled, device=device)
        probs = probabilities(logits if index is None else logits[index], self._params)
        tokens = torch.empty(len(probs), dtype=torch.int64, device=device)
        if self._coupled:
            rows = _rows(self._coupled, probs)
            tokens[rows] = race(probs[rows], torch.from_numpy(self._keys[place]).to(device))
        if self._free:
            rows = _rows(self._free, probs)
            own = probs[rows]
            tokens[rows] = inverse_cdf(fixed_point(own), torch.from_numpy(self._numbers[place]).to(device))
            self.proposals.probs.append(own)
        if index is None:
            return tokens
        chosen = logits.argmax(dim=-1)
        chosen[index] = tokens
        return chosen


def _positions(points: list[DraftPoint], max_drafts: int) -> list[int]:
    """Where the drafts of each place land, place after place."""
    return [point.length + place for place in range(max_drafts) for point in points]


def _rows(some: list[int], table: Tensor) -> Tensor | slice:
    """Index of some rows of a table, which costs nothing when they are all of them."""
    return slice(None) if len(some) == len(table) else torch.tensor(some, device=table.device)
