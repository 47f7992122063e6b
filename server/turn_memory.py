"""Turns with tool calls that were generated here, found again by the ids of their calls when they come back as history.

Two things depend on such a turn being rendered as it was sampled. Clients that drop its reasoning change the prompt from there on; put
back, the prompt stays the same (opt-in: it then holds more than the client sent). And calls are rendered in the one spelling of the
encoder, while the model may have written blanks, escapes or an order of its own; with the exact ids of the turn the prompt extends what
the model wrote. Both only where the visible turn is the same: content, names, and arguments as JSON values.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.conversation import call_arguments

BYTES_OF_TURN = 500  # of a turn with one call, without its texts and ids
Turns = Mapping[str, "Turn"]  # by the id of the first call


@dataclass(frozen=True, slots=True)
class Turn:
    """What one answer said. salt: of the tenant who got it. calls: names and arguments as they were given out.

    header: the text that opened the turn in its prompt. token_ids: all of the turn behind that, without the end token; empty when the
    ids do not spell the whole turn.
    """

    salt: str
    call_ids: tuple[str, ...]
    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...] = ()
    header: str = ""
    token_ids: Sequence[int] = field(default_factory=lambda: array("I"))

    @property
    def num_bytes(self) -> int:
        """About what it takes: texts of one to four bytes a character, ids of four bytes."""
        texts = (self.content, self.reasoning, self.header, *(text for call in self.calls for text in call))
        return BYTES_OF_TURN + sum(map(sys.getsizeof, texts)) + 4 * len(self.token_ids)

    def says(self, message: Mapping[str, Any]) -> bool:
        """Whether an assistant message shows this very turn, reasoning aside."""
        calls = message.get("tool_calls")
        if _call_ids(calls) != self.call_ids or (message.get("content") or "") != self.content:
            return False
        try:
            return [_canonical(*call) for call in _calls(calls or ())] == [_canonical(*call) for call in self.calls]
        except RecursionError:  # arguments nested deeper than anything that was given out
            return False


class TurnMemory:
    """One per front, on the event loop's thread. The turns that were not asked for the longest go first, once `most_bytes` are kept."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._turns: OrderedDict[str, Turn] = OrderedDict()
        self._sizes: dict[str, int] = {}  # as they were counted: a text grows once somebody asks for its UTF-8
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def remember(self, turn: Turn) -> None:
        """Turns without calls, and those with nothing to put back, are not worth a place; one larger than the memory has none."""
        size = turn.num_bytes
        if not turn.call_ids or not (turn.reasoning or turn.token_ids) or size > self._most_bytes:
            return
        name = turn.call_ids[0]
        if name in self._turns:
            self._forget(name)
        self._turns[name], self._sizes[name] = turn, size
        self._num_bytes += size
        while self._num_bytes > self._most_bytes:
            self._forget(next(iter(self._turns)))

    def _forget(self, name: str) -> None:
        del self._turns[name]
        self._num_bytes -= self._sizes.pop(name)

    def among(self, messages: Any, salt: str) -> Turns:
        """The remembered turns of one tenant whose calls appear in the messages of a request, which may be malformed."""
        found: dict[str, Turn] = {}
        if not self._turns or not isinstance(messages, list):
            return found
        for message in messages:
            ids = _call_ids(message.get("tool_calls")) if isinstance(message, dict) else ()
            turn = self._turns.get(ids[0]) if ids else None
            if turn is not None and turn.salt == salt:
                self._turns.move_to_end(ids[0])
                found[ids[0]] = turn
        return found


def with_reasoning(messages: Any, turns: Turns) -> Any:
    """The messages of a request, with the reasoning of those `turns` that come back without it. Never changes its input."""
    if not turns:
        return messages
    return [_with_reasoning(message, turns) for message in messages]


def _with_reasoning(message: Any, turns: Turns) -> Any:
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    if message.get("reasoning_content") or message.get("reasoning"):
        return message
    turn = turn_of(message, turns)
    return message if turn is None or not turn.reasoning else {**message, "reasoning_content": turn.reasoning}


def turn_of(message: Mapping[str, Any], turns: Turns) -> Turn | None:
    """The remembered turn that a message shows, or None."""
    ids = _call_ids(message.get("tool_calls"))
    turn = turns.get(ids[0]) if ids else None
    return turn if turn is not None and turn.says(message) else None


def _call_ids(calls: Any) -> tuple[str, ...]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return ()
    return tuple(call["id"] for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str))


def _calls(calls: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(name, arguments) of calls, of any type."""
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return [(f.get("name"), f.get("arguments")) if isinstance(f, dict) else (None, None) for f in functions]


def _canonical(name: Any, arguments: Any) -> tuple[Any, str]:
    """Equal exactly for calls of one meaning: blanks, escapes and the order of keys do not count, 1 and 1.0 differ."""
    absent = arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null"))
    return name, json.dumps({} if absent else call_arguments(arguments), sort_keys=True)
