"""What a client asked for (`Request`), its token time line (`Sequence`) and what the engine answers (`Output`)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from engine.errors import RequestError
from hicache.ranking import DEFAULT_PRIORITY

if TYPE_CHECKING:
    from engine.structured_output import Matcher


class FinishReason(StrEnum):
    """Why a sequence ended. The server maps these to the API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TOO_LONG = "prompt_length_exceeded"
    PREEMPTED = "insufficient_system_resource"
    ERROR = "error"


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# A logit divided by less overflows fp32; a draw at this temperature is the arg-max already.
LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Neutral values leave logits bit-unchanged.

    temperature 0, or one below `LEAST_TEMPERATURE`, is exact arg-max (lowest id on ties). top_k -1 means all. `seed` None draws one per
    request.
    `logprobs` asks for the chosen token's log-probability, `top_logprobs` for that many alternatives, both of the model's own
    distribution (temperature 1, unmodified logits). Stop strings are matched where text exists (server, `LLM`), not here.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for ok, name, allowed in (
            (0 <= self.temperature < float("inf"), "temperature", ">= 0"),
            (0 < self.top_p <= 1, "top_p", "in (0, 1]"),
            (self.top_k == -1 or self.top_k >= 1, "top_k", "-1 or >= 1"),
            (0 <= self.min_p <= 1, "min_p", "in [0, 1]"),
            (0 < self.repetition_penalty < float("inf"), "repetition_penalty", "> 0"),
            (-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]"),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]"),
            (self.max_tokens >= 1, "max_tokens", ">= 1"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", "in [0, max_tokens]"),
            (0 <= self.top_logprobs <= 1000, "top_logprobs", "in [0, 1000]"),
        ):
            if not ok:
                raise RequestError(f"{name} is {getattr(self, name)!r}", hint=f"{name} must be {allowed}")
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def is_filtered(self) -> bool:
        """Whether a draw leaves some tokens out."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class SamplingTraits:
    """Which parts of the sampler's work a request's parameters need; known once, asked in every step.

    on_device: nothing but the largest logit or a draw from the whole distribution. plain_drawn: no work besides filters and a draw.
    """

    edits: bool
    greedy: bool
    logprobs: bool
    plain_greedy: bool
    on_device: bool
    plain_drawn: bool

    @staticmethod
    def of(params: SamplingParams) -> SamplingTraits:
        edits = bool(
            params.logit_bias
            or params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
            or params.min_tokens > 0
        )
        greedy = params.temperature == 0.0
        logprobs = params.logprobs or params.top_logprobs > 0
        plain = not edits and not logprobs
        on_device = plain and (greedy or not params.is_filtered)
        return SamplingTraits(edits, greedy, logprobs, greedy and plain, on_device, plain and not greedy)


class GrammarKind(StrEnum):
    """How a grammar's text is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match from its first token, or from the token behind a trigger.

    text: schema, pattern or grammar; empty for any JSON object. trigger_token_ids: output is free until this sequence has been
    generated. reserved_token_ids: never chosen before that, so that the output cannot end or go another way first.
    """

    kind: GrammarKind
    text: str = ""
    trigger_token_ids: tuple[int, ...] = ()
    reserved_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `cache_read`/`cache_write` False bypass the prefix cache in that direction.

    cache_decode: the next prompt of this conversation will begin with this prompt and its answer, token by token.
    cache_anchor_tokens: length of the leading part that other prompts are likely to share (system and tools text), 0 if unknown.
    cache_scope: salt of all requests that may know of each other's prefixes; they hit only what has their own `cache_salt`.
    cache_priority: 0 (goes first) to 100, how long its prefix stays in the host cache; `cache_priority_s`: when one above the default
    ends.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_read: bool = True
    cache_write: bool = True
    cache_salt: str = ""
    cache_scope: str = ""
    cache_priority: int = DEFAULT_PRIORITY
    cache_priority_s: float = math.inf
    cache_anchor_tokens: int = 0
    cache_decode: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of the emitted token and the most probable alternatives (id, log-probability), best first."""

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time to the first token went, in seconds of the engine's monotonic clock."""

    queue_s: float
    restore_s: float
    prefill_s: float


class Output(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Tokens that one step added to a request. The last one carries `finish_reason`; it may come without tokens.

    One is made per sequence and step: a struct costs a fifth of a dataclass, and it travels to the front without the names of its fields.

    `cached_tokens` and `timing` are set on a request's first output. `drafted`/`accepted` count speculation in this step.
    `stop_token_id` names the id that ended the sequence (EOS or one of `stop_token_ids`).
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int | None = None
    timing: Timing | None = None
    drafted: int = 0
    accepted: int = 0
    error: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens and where their cache lives. Owned by the scheduler; nobody else writes its fields, except that
    `PrefixCache.restore` sets `num_computed`, `cached_tokens` and the two starts of a sequence handed to it, and a drafter `draft_rates`.

    token_ids: prompt and committed output. num_computed: leading tokens whose cache rows are valid.
    swa_valid_start, entries_start: of a prefill that replays restored tokens, see `SequenceSlice`; else 0.
    block_table: device block ids, block i holds tokens [i*block_size, (i+1)*block_size). state_slot: -1 when none.
    prefill_len: tokens to prefill before decoding (the prompt; after preemption also the output so far).
    draft_rates: how likely each draft of the last round was to be kept, with all before it; empty before the first round.
    flights: steps with this sequence that are planned and not committed; pending: most tokens that the latest of them may add.
    matcher: follows the output of a request with a grammar; it reads tokens that it has not seen, so preemption does not concern it.
    packed_prompt: the prompt as unsigned machine integers of 32 bits, None when nobody made them.
    max_len: length at which the sequence ends. stop_ids: tokens that end it. Both are known once it is in the scheduler.
    """

    seq_id: int
    request: Request
    arrival_s: float
    seed: int
    token_ids: list[int]
    prompt_len: int
    prefill_len: int
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    swa_valid_start: int = 0
    entries_start: int = 0
    block_table: list[int] = field(default_factory=list)
    state_slot: int = -1
    checkpoints: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    num_preemptions: int = 0
    admitted_s: float = 0.0
    restored_s: float = 0.0
    first_token_s: float = 0.0
    draft_rates: list[float] = field(default_factory=list)
    flights: int = 0
    pending: int = 0
    matcher: Matcher | None = None
    packed_prompt: array[int] | None = None
    max_len: int = 0
    stop_ids: frozenset[int] = frozenset()
    traits: SamplingTraits = field(init=False)

    def __post_init__(self) -> None:
        self.traits = SamplingTraits.of(self.request.params)

    @property
    def remaining(self) -> int:
        """Most tokens that it may still produce, those of a step in flight included."""
        return self.max_len - len(self.token_ids)

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED
