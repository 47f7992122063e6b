"""One generated conversation, before rendering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipes.tiny.words import Source

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer in one short sentence.",
    "Be brief.",
    "Answer from the conversation.",
    "You are a careful assistant.",
    "Answer the questions of the user.",
    "You help with lists, documents and tools.",
)


@dataclass(slots=True)
class Conversation:
    """messages: as `encode_messages` takes them. effort None means chat mode. tests: the final assistant message is what a score checks."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    effort: str | int | None = None
    family: str = ""

    def system(self, text: str = "", **extra: Any) -> None:
        self.messages.insert(0, {"role": "system", "content": text, **extra})

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def assistant(self, text: str, reasoning: str = "", calls: list[tuple[str, dict[str, Any]]] | None = None) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.effort is not None and reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": f"c{len(self.messages)}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
        self.messages.append(message)

    def tool_results(self, results: list[str]) -> None:
        calls = self.messages[-1]["tool_calls"]
        self.messages += [{"role": "tool", "tool_call_id": c["id"], "content": r} for c, r in zip(calls, results, strict=True)]

    @property
    def num_chars(self) -> int:
        return sum(len(m["content"]) + 12 for m in self.messages)

    @property
    def effort_level(self) -> int:
        """1..100; reasoning gets a check sentence from 90 on and is cut short up to 50."""
        return {"low": 50, "high": 75, "max": 100}.get(str(self.effort), self.effort if isinstance(self.effort, int) else 75)


def choose_effort(source: Source, thinking: float) -> str | int | None:
    """Chat mode, or a thinking effort: mostly the named ones."""
    if not source.chance(thinking):
        return None
    return source.rng.choice(["low", "high", "high", "max", source.rng.randint(1, 100)])


def reason(c: Conversation, first: str, second: str = "", check: str = "Checked.") -> str:
    """Reasoning text whose length follows the effort."""
    level = c.effort_level
    parts = [first] + ([second] if second and level > 50 else []) + ([check] if level >= 90 else [])
    return " ".join(parts)


def add_system(c: Conversation, source: Source, share: float = 0.5) -> None:
    if source.chance(share):
        c.system(source.rng.choice(SYSTEM_TEXTS))
