"""Drafts of the running sequences: where they come from, how they are drawn, how many of them a step verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.draws import fixed_point, inverse_cdf, race
from engine.models.draft import Choose, DraftSlice
from engine.random_keys import MASK64, draws53, race_keys
from engine.request import Sequence
from engine.sampler import probabilities
from engine.spec_decode import NO_PROPOSALS, Proposals
from engine.spec_lengths import FixedLength, LengthPolicy, survival_rates

# Draws of drafts by rejection must be independent of all others, also of the last round's draw for the same position: the number of
# drafts that are verified may depend on that one. So the seed moves with the place where the block starts.
_SEED_STEP = 1_000_000_007


@dataclass(frozen=True, slots=True)
class DraftPoint:
    """Where drafts of a sequence begin: behind `token_id`, the last of its `length` tokens. The sequence itself may not know it yet."""

    seq: Sequence
    token_id: int
    length: int

    @staticmethod
    def of(seq: Sequence) -> DraftPoint:
        """Behind a sequence that knows all its tokens."""
        return DraftPoint(seq, seq.token_ids[-1], len(seq.token_ids))


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


class Recorder(Protocol):
    """Somebody who studies drafts, see `engine/spec_stats.py`."""

    def on_draft(self, seqs: list[Sequence], confidence: Tensor) -> None: ...

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
        self._temperatures = torch.tensor(temperatures or [1.0] * max_drafts)

    def propose(self, points: list[DraftPoint], rooms: list[int]) -> list[list[int]]:
        """Drafts for each sequence, at most `rooms[i]`. The budget comes from earlier rounds, its distribution from this one."""
        self.proposals = NO_PROPOSALS
        seqs = [point.seq for point in points]
        budget = self.policy.budget([seq.draft_rates for seq in seqs], rooms)
        if budget == 0:
            return [[] for _ in seqs]
        sampling = _DraftSampling.of(points, self.max_drafts)
        slices = [DraftSlice(point.token_id, point.length - 2, point.seq.state_slot) for point in points]
        output = self._runner.draft(slices, sampling.choose if sampling else None)
        if sampling is not None:
            self.proposals = sampling.proposals
        if self.recorder is not None:
            self.recorder.on_draft(seqs, output.confidence)
        drafts = output.token_ids[:, : self.max_drafts].tolist()
        rates = survival_rates(output.confidence[:, : self.max_drafts].cpu(), self._temperatures)
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
        seqs = [point.seq for point in points]
        self._params = [seqs[i].request.params for i in sampled]
        self._lens = [points[i].length for i in sampled]
        self._seeds = [seqs[i].seed for i in sampled]
        self._coupled = [k for k, params in enumerate(self._params) if params.seed is not None]
        self._free = [k for k, params in enumerate(self._params) if params.seed is None]
        self.proposals = Proposals({seqs[sampled[k]].seq_id: row for row, k in enumerate(self._free)}, [])

    @staticmethod
    def of(points: list[DraftPoint], max_drafts: int) -> _DraftSampling | None:
        """None when all sequences are greedy."""
        sampled = [i for i, point in enumerate(points) if point.seq.request.params.temperature > 0.0]
        return _DraftSampling(points, max_drafts, sampled) if sampled else None

    def choose(self, place: int, logits: Tensor) -> Tensor:
        """logits: [B, V]. Sequences with a seed run the race that the target will run; the others draw numbers of their own."""
        chosen = logits.argmax(dim=-1)
        if place >= self._max_drafts:
            return chosen
        device = logits.device
        index = torch.tensor(self._sampled, device=device)
        probs = probabilities(logits[index], self._params)
        tokens = chosen[index]
        if self._coupled:
            keys = race_keys([self._seeds[k] for k in self._coupled], [self._lens[k] + place for k in self._coupled])
            rows = torch.tensor(self._coupled, device=device)
            tokens[rows] = race(probs[rows], torch.from_numpy(keys).to(device))
        if self._free:
            seeds = [(self._seeds[k] + _SEED_STEP * self._lens[k]) & MASK64 for k in self._free]
            numbers = draws53(seeds, [self._lens[k] + place for k in self._free])
            rows = torch.tensor(self._free, device=device)
            tokens[rows] = inverse_cdf(fixed_point(probs[rows]), torch.from_numpy(numbers).to(device))
            self.proposals.probs.append(probs[rows])
        chosen[index] = tokens
        return chosen
