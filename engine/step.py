"""What passes between scheduler, model and sampler: limits, one step's plan, and what was sampled for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.batch import Batch, LateTokens, SequenceSlice, StepKind
from engine.request import Sequence, TokenLogprob


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that do not change while the engine runs. Tokens, sequences and blocks; block 0 and slot 0 are included in the counts.

    history_len: tokens before a slice that the model's n-gram tables look at. max_drafts: most drafts of one sequence and step.
    part: whose range of block and slot ids this is, among ranks that prefill prompts together.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    num_state_slots: int
    block_size: int
    eos_token_ids: frozenset[int]
    history_len: int = 0
    chunked_prefill: bool = True
    stop_preempted_request: bool = False
    max_drafts: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of this rank, planned from committed tokens. Empty `seqs`: the rank takes part without work of its own.

    rows: the sequences whose logits the batch asks for, in order. idle: nobody in the group has work, no step is taken.
    rooms: in a decode step, tokens that each sequence may have behind its slice before its blocks or its length limits end.
    A step before this one may still be computed when it is planned; `engine/late_tokens.py` brings the slices up to date then.
    """

    kind: StepKind
    seqs: list[Sequence] = field(default_factory=list)
    slices: list[SequenceSlice] = field(default_factory=list)
    rows: list[Sequence] = field(default_factory=list)
    idle: bool = False
    rooms: list[int] = field(default_factory=list)

    def batch(self, late: LateTokens | None = None) -> Batch:
        return Batch(self.kind, self.slices, late)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler chose for the rows of a step, in row order. `errors` maps a failed row to its reason.

    drafted: in a verify step, how many drafts were checked in each row; the row's tokens are those kept and one behind them.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerCounters:
    """Cumulative figures of one rank; tokens unless the name says otherwise.

    verifications: sequences times verify steps. verified_at, accepted_at: drafts checked and kept, by place in the block.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    computed_prefill_tokens: int = 0
    prompt_steps: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    finished: int = 0
    verifications: int = 0
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
