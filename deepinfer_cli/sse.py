"""Server-sent events of an OpenAI-compatible stream: lines in, chunks out. Pure; the same code serves chat, check-cache and load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class StreamError(Exception):
    """The stream carried an error object, or something that is not an event. `code` is the server's word for it."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event. `tokens`: text of each token with log-probabilities, where the request asked for them."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    tokens: tuple[str, ...] = ()

    @property
    def carries_output(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(slots=True)
class StreamState:
    """What was seen so far. A good stream has a finish reason and ends with `[DONE]`. extension: the field `deepinfer` of our server."""

    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    extension: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False
    _error_event: bool = False

    def push(self, line: str) -> Chunk | None:
        """One line without its end -> a chunk, or None for comments, blank lines and `[DONE]`.

        Raises: StreamError for an error object, for data that is not JSON, and for an object of another form.
        """
        if line.startswith("event:"):
            self._error_event = line[6:].strip() == "error"
            return None
        if not line.startswith("data:"):
            return None
        text = line[5:].strip()
        if text == "[DONE]":
            self.done = True
            return None
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            raise StreamError(f"the stream holds data that is not JSON: {text[:80]!r}", "bad_event") from None
        if self._error_event or not isinstance(event, dict) or "error" in event:
            raise _stream_error(event)
        try:
            chunk = _chunk(event)
        except (TypeError, ValueError, AttributeError, LookupError):
            raise StreamError(f"the stream holds an event of another form: {text[:80]!r}", "bad_event") from None
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage
        self.extension = event["deepinfer"] if isinstance(event.get("deepinfer"), dict) else self.extension
        return chunk


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """Tokens that came from the prefix cache, or None when the server does not say."""
    details = usage.get("prompt_tokens_details") or {}
    value = details.get("cached_tokens", usage.get("prompt_cache_hit_tokens"))
    return int(value) if value is not None else None


def error_text(body: Any) -> tuple[str, str]:
    """Message and code of an error body, whatever its shape."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        return str(error.get("message") or error), str(error.get("code") or error.get("type") or "")
    return str(error), ""


def _stream_error(event: Any) -> StreamError:
    message, code = error_text(event)
    return StreamError(message, code)


def _chunk(event: Mapping[str, Any]) -> Chunk:
    """Raises: TypeError and its like for what has another form, so that nobody behind has to ask."""
    usage = event.get("usage") or None
    if usage is not None:
        counts = [usage.get("completion_tokens"), usage.get("prompt_tokens"), cached_tokens(usage)]
        if not all(isinstance(count or 0, int | float) for count in counts):
            raise TypeError("a count is no number")
    choices = event.get("choices") or []
    if not choices:
        return Chunk(usage=usage)
    choice = choices[0]
    delta = choice.get("delta") or {}
    logprobs = choice.get("logprobs") or {}
    content, reasoning = delta.get("content") or choice.get("text") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
    tool_calls, reason = tuple(delta.get("tool_calls") or ()), choice.get("finish_reason")
    if not all(isinstance(text, str) for text in (content, reasoning, reason or "")) or not all(map(_is_call, tool_calls)):
        raise TypeError("texts and calls have another type")
    return Chunk(
        content=content,
        reasoning=reasoning,
        tool_calls=tool_calls,
        finish_reason=reason,
        usage=usage,
        tokens=tuple(str(item.get("token")) for item in (logprobs.get("content") or ()) if isinstance(item, dict)),
    )


def _is_call(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("function") or {}, dict)
