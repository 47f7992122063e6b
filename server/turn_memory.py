"""Reasoning that clients drop: remembered by tool-call id and put back when the same turn returns without it.

With tools declared the model is trained to find its earlier reasoning in the history. A client that sends its calls back without it
changes the prompt from that turn on, so nothing behind it hits. Opt-in: the prompt then holds more than the client sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_TURNS = 4096
MOST_CHARACTERS = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Turn:
    """What one answer said. salt: of the tenant who got it."""

    salt: str
    call_ids: tuple[str, ...]
    content: str
    reasoning: str


class TurnMemory:
    """One per front, on the event loop's thread. The oldest turns go first."""

    def __init__(self, most_turns: int = MOST_TURNS, most_characters: int = MOST_CHARACTERS) -> None:
        self._most_turns, self._most_characters = most_turns, most_characters
        self._turns: OrderedDict[str, Turn] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._turns)

    def remember(self, turn: Turn) -> None:
        """Turns without calls or reasoning are not worth a place."""
        if not turn.call_ids or not turn.reasoning:
            return
        if (same := self._turns.pop(turn.call_ids[0], None)) is not None:
            self._characters -= len(same.reasoning)
        self._turns[turn.call_ids[0]] = turn
        self._characters += len(turn.reasoning)
        while len(self._turns) > self._most_turns or self._characters > self._most_characters:
            self._characters -= len(self._turns.popitem(last=False)[1].reasoning)

    def complete(self, messages: Any, salt: str) -> Any:
        """The messages of a request, with the reasoning of remembered turns whose visible part is the same. Never changes its input."""
        if not self._turns or not isinstance(messages, list):
            return messages
        return [self._complete(message, salt) for message in messages]

    def _complete(self, message: Any, salt: str) -> Any:
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return message
        if message.get("reasoning_content") or message.get("reasoning"):
            return message
        ids = _call_ids(message.get("tool_calls"))
        turn = self._turns.get(ids[0]) if ids else None
        if turn is None or turn.salt != salt or turn.call_ids != ids or (message.get("content") or "") != turn.content:
            return message
        return {**message, "reasoning_content": turn.reasoning}


def _call_ids(calls: Any) -> tuple[str, ...]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return ()
    return tuple(call["id"] for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str))
