"""The JSON of answers: chunks and complete messages of chat and plain completions, and usage. Pure functions of pieces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from server.choice import Choice, Entry
from server.output_parser import Delta, DeltaKind
from server.tickets import Ticket

Logprobs = Mapping[DeltaKind, list[Entry]]  # of one choice, by section
FINGERPRINT = "dix-0.1.0"


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer has in common."""

    id: str
    object: str
    created: int
    model: str

    def with_choices(self, choices: list[dict[str, Any]], object_suffix: str = "") -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object + object_suffix,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


def new_head(kind: str, prefix: str, model: str) -> Head:
    return Head(f"{prefix}-{secrets.token_hex(16)}", kind, int(time.time()), model)


def usage(ticket: Ticket, choices: list[Choice]) -> dict[str, Any]:
    """Always numbers. The prompt counts once, output of all choices is summed.

    Cached tokens are those that the first choice reused. Every choice is a sequence of its own to the engine, so the ranks' counters of
    prompt and cached tokens grow by each of them; with one choice both agree.
    """
    completion = sum(choice.num_tokens for choice in choices)
    reasoning = sum(choice.parser.reasoning_tokens for choice in choices)
    return usage_of(ticket.prompt_len, completion, ticket.cached_tokens, reasoning, ticket.drafted, ticket.accepted)


def timing_of(ticket: Ticket) -> dict[str, Any]:
    """Which rank, and where the time went in seconds: the engine up to the first token, and `first_output_s` from dispatch to the front."""
    first_s = None if ticket.first_output_s is None else ticket.first_output_s - ticket.started_s
    parts = {} if ticket.timing is None else asdict(ticket.timing)
    return {"rank": ticket.rank, **parts, "first_output_s": first_s, "drafted_tokens": ticket.drafted, "accepted_tokens": ticket.accepted}


def usage_of(prompt: int, completion: int, cached: int, reasoning: int, drafted: int = 0, accepted: int = 0) -> dict[str, Any]:
    """drafted, accepted: tokens that speculation verified and kept; their fields are there only when it verified some."""
    details = {"reasoning_tokens": reasoning}
    if drafted:
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": details,
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }


def chat_delta(piece: Delta, reasoning_alias: bool = False) -> dict[str, Any]:
    """One kind per chunk: common clients look at one and drop the others. `reasoning_alias` sends reasoning under both of its names."""
    match piece.kind:
        case DeltaKind.REASONING:
            return {"reasoning_content": piece.text, "reasoning": piece.text} if reasoning_alias else {"reasoning_content": piece.text}
        case DeltaKind.CONTENT:
            return {"content": piece.text}
        case DeltaKind.TOOL_START:
            call = {"index": piece.call_index, "id": piece.call_id, "type": "function", "function": {"name": piece.text, "arguments": ""}}
            return {"tool_calls": [call]}
        case DeltaKind.TOOL_ARGUMENTS:
            return {"tool_calls": [{"index": piece.call_index, "function": {"arguments": piece.text}}]}


def logprobs_of(kind: DeltaKind, entries: list[Entry]) -> dict[str, Any]:
    name = "reasoning_content" if kind is DeltaKind.REASONING else "content"
    return {name: entries} if name == "content" else {"content": None, name: entries}


def chunk_choice(
    index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def complete_choice(choice: Choice, *, thinking: bool, reasoning_alias: bool, logprobs: Logprobs | None) -> dict[str, Any]:
    """A whole message: exactly what the deltas of a stream add up to. logprobs: None when the request asked for none."""
    text, reasoning = "".join(choice.content), "".join(choice.reasoning)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not choice.calls else None}
    if thinking:
        message["reasoning_content"] = reasoning
        if reasoning_alias:
            message["reasoning"] = reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(call.arguments)}}
            for call in choice.calls
        ]
    shown = None
    if logprobs is not None:
        shown = {"content": logprobs[DeltaKind.CONTENT]}
        if thinking:
            shown["reasoning_content"] = logprobs[DeltaKind.REASONING]
    answer = {"index": choice.index, "message": message, "logprobs": shown, "finish_reason": choice.finish_reason}
    if choice.stop_reason is not None:
        answer["stop_reason"] = choice.stop_reason
    return answer


def plain_logprobs(entries: list[Entry], offset: int) -> dict[str, Any]:
    """The parallel lists of plain completions; offsets count characters of the choice's text."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": offsets,
    }
