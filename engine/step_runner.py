"""Computes planned steps: drafts, forward pass, sampling. Runs on the stream; scheduling never touches what it owns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.batch import LateTokens, LogitRows, SequenceSlice, StepKind
from engine.choices import step_choices
from engine.draft_sampling import DraftPoint
from engine.drafter import DrafterLike
from engine.late_tokens import caught_up
from engine.readout import Largest, Readout
from engine.sampler import Sampler, take_largest
from engine.spec_decode import NO_PROPOSALS
from engine.step import Sampled, Step
from engine.step_timing import StepWatch


@dataclass(frozen=True, slots=True)
class Late:
    """What a plan did not know: the tokens of the step before it. rows: see `later_rows`."""

    rows: list[int]
    sampled: Callable[[], Sampled | Readout]


@dataclass(frozen=True, slots=True)
class Computed:
    """A step after its forward pass. drafts: of each sequence in a verify step. logits: [R, V] fp32, or all that anybody wants of them."""

    step: Step
    logits: Tensor | Largest
    drafts: list[list[int]] = field(default_factory=list)


class StepRunner:
    """Model, drafter and sampler of one rank."""

    def __init__(self, runner: Any, sampler: Sampler, drafter: DrafterLike | None, history_len: int, keep_on_device: bool = False) -> None:
        """keep_on_device: leave sampled ids there where possible, for a caller that starts the next step before it reads them."""
        self.runner, self.sampler, self.drafter = runner, sampler, drafter
        self._keep_on_device = keep_on_device
        self._history_len = history_len
        self._watch = StepWatch(runner.limits.device)

    def time_with(self, timer: Callable[[], float]) -> None:
        """Time steps on a CPU with another timer; none is computed now."""
        self._watch = StepWatch(self.runner.limits.device, timer)

    def forward(self, step: Step, late: Late | None = None) -> Computed:
        """Drafts of a decode step, if it pays, then the forward pass."""
        tokens: LateTokens | None = None
        if late is not None:
            sampled = late.sampled()
            if isinstance(sampled, Readout):
                tokens = LateTokens(late.rows, sampled.ids)
                sampled = Sampled([[0]] * len(sampled.ids))
            step = caught_up(step, late.rows, sampled, self._history_len)
        drafts: list[list[int]] = []
        if step.kind is StepKind.DECODE and self.drafter is not None:
            drafts = self._propose(step, self.drafter)
        return self.run(step, drafts, tokens)

    def run(self, step: Step, drafts: list[list[int]], tokens: LateTokens | None = None) -> Computed:
        """The forward pass, with drafts to verify or none. tokens: what only the device knows of the step before it."""
        if drafts:
            step = with_drafts(step, drafts)
        self._watch.start()
        logits = self._run(step, drafts, tokens)
        self._watch.forward_enqueued()
        return Computed(step, logits, drafts)

    def sample(self, computed: Computed) -> Sampled | Readout:
        """Tokens of a step. Everything that the step before it produced is in its sequences by now."""
        step, logits = computed.step, computed.logits
        if not step.rows:
            return Sampled([])
        if self._keep_on_device and isinstance(logits, Tensor) and step.kind is StepKind.DECODE and self.drafter is None:
            readout = self.sampler.enqueue(logits, step.rows)
            if readout is not None:
                return readout
        self._watch.sampling()
        if step.kind is StepKind.VERIFY:
            assert self.drafter is not None, "drafts without a drafter"
            if isinstance(logits, Largest):
                sampled = self.sampler.verify_largest(logits, step.rows, computed.drafts)
            else:
                sampled = self.sampler.verify(logits, step.rows, computed.drafts, self.drafter.proposals)
            self.drafter.observe(step.rows, computed.drafts, sampled.token_ids)
        else:
            sampled = take_largest(logits) if isinstance(logits, Largest) else self.sampler(logits, step.rows)
        if self.drafter is not None and step.kind is not StepKind.PREFILL:
            self.drafter.policy.observe_cost(len(logits), len(step.rows), self._watch.stop())
        return sampled

    def _run(self, step: Step, drafts: list[list[int]], tokens: LateTokens | None) -> Tensor | Largest:
        """Logits; or just the tokens, where nobody wants more and compiled code chooses them."""
        if tokens is None and self.sampler.wants_largest(step.rows):
            return self.runner.run_greedy(step.batch())
        if tokens is None and self.sampler.wants_tokens(step.rows):
            proposals = NO_PROPOSALS if self.drafter is None else self.drafter.proposals
            return self.runner.run_drawn(step.batch(), step_choices(step.rows, _first_positions(step.slices), drafts, proposals))
        return self.runner.run(step.batch(tokens))

    def _propose(self, step: Step, drafter: DrafterLike) -> list[list[int]]:
        """Drafts of every sequence; nothing when none has any. One token has to follow them, hence room counts from there."""
        if drafter.policy.rests(len(step.seqs)):
            return []
        rooms = [min(drafter.max_drafts, room) for room in step.rooms]
        asked = [i for i, room in enumerate(rooms) if room > 0]
        if not asked:
            return []
        points = [DraftPoint(step.seqs[i], step.slices[i].token_ids[-1], step.slices[i].end) for i in asked]
        began = self._watch.now()
        proposed = drafter.propose(points, [rooms[i] for i in asked])
        if not any(proposed):
            return []
        drafter.policy.observe_draft(len(points), self._watch.now() - began)
        drafts: list[list[int]] = [[] for _ in step.seqs]
        for i, ids in zip(asked, proposed, strict=True):
            drafts[i] = ids
        return drafts


def _first_positions(slices: list[SequenceSlice]) -> list[int]:
    """Behind the first row of every slice that has logits."""
    return [s.start + 1 if s.logit_rows is LogitRows.ALL else s.end for s in slices if s.logit_rows is not LogitRows.NONE]


def with_drafts(step: Step, drafts: list[list[int]]) -> Step:
    """The verify step: each sequence's drafts stand behind its last token, and all rows have logits."""
    slices = [
        SequenceSlice(
            [*s.token_ids, *ids], s.start, s.end + len(ids), s.block_table, s.state_slot, s.history, s.swa_valid_start, LogitRows.ALL
        )
        for s, ids in zip(step.slices, drafts, strict=True)
    ]
    return Step(StepKind.VERIFY, step.seqs, slices, step.rows, step.idle, step.rooms)
