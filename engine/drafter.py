"""Drafts of the running sequences: where they come from, how they are drawn, how many of them a step verifies."""

from __future__ import annotations

from typing import Any, Protocol

from engine.choices import drawing_of
from engine.draft_sampling import DraftPoint, ProposalMemory, TorchDraws, compiled_drafts
from engine.models.draft import Choose, DraftSlice
from engine.request import Sequence
from engine.spec_decode import NO_PROPOSALS, Proposals
from engine.spec_lengths import MIN_TEMPERATURE, FixedLength, LengthPolicy, survival_rates


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
        self._memory = ProposalMemory()
        self._end_token_ids = end_token_ids
        self._temperatures = [max(temperature, MIN_TEMPERATURE) for temperature in temperatures or [1.0] * max_drafts]

    def propose(self, points: list[DraftPoint], rooms: list[int]) -> list[list[int]]:
        """Drafts for each sequence, at most `rooms[i]`. The budget comes from earlier rounds, its distribution from this one."""
        self.proposals = NO_PROPOSALS
        seqs = [point.seq for point in points]
        budget = self.policy.budget([seq.draft_rates for seq in seqs], rooms)
        if budget == 0:
            return [[] for _ in seqs]
        drafts, confidence = self._draft(points)
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

    def _draft(self, points: list[DraftPoint]) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and confidences of every block; `proposals` is what drawn ones come from."""
        slices = [DraftSlice(point.token_id, point.length - 2, point.seq.state_slot) for point in points]
        if not any(point.drawn for point in points):
            return self._runner.draft_greedy(slices)
        drawing = drawing_of(self._runner)
        if drawing is not None:
            drafts, confidence, self.proposals = compiled_drafts(drawing, points, slices, self.max_drafts, self._memory)
            return drafts, confidence
        draws = TorchDraws(points, self.max_drafts)
        output = self._runner.draft(slices, draws.choose)
        self.proposals = draws.proposals
        return output.token_ids.tolist(), output.confidence.tolist()

    def _useful(self, seq: Sequence, drafts: list[int]) -> int:
        """Drafts up to the first that would end the sequence: what follows it is never kept."""
        params = seq.request.params
        for place, token in enumerate(drafts):
            if (token in self._end_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
                return place + 1
        return len(drafts)
