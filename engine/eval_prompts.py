"""Held-out prompts of the embedded model and how an answer to one of them is judged: exactly, reasoning aside."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models import tiny_encoding
from engine.models.tiny import TRAINED_DIR

PROMPTS_FILE = TRAINED_DIR / "eval_prompts.json.gz"
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """messages without the last answer; effort None is chat mode; expected: `content` and `tool_calls` of the answer."""

    set: str
    messages: list[dict[str, Any]]
    effort: str | int | None
    expected: dict[str, Any]

    @property
    def mode(self) -> str:
        return "chat" if self.effort is None else "thinking"

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer was asked to obey, if any."""
        form = self.messages[0].get("response_format") or {}
        return form if form.get("type") == "object" else None

    def render(self) -> str:
        """The prompt as the chat encoder writes it."""
        return str(tiny_encoding.encode_messages(self.messages, self.mode, reasoning_effort=self.effort))


@dataclass(frozen=True, slots=True)
class Reply:
    """What an answer says. tool_calls: (name, arguments); an argument text that is no JSON stays a text."""

    content: str
    tool_calls: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(content: str | None, tool_calls: Sequence[dict[str, Any]] | None) -> Reply:
        """tool_calls: as the encoder or an OpenAI message writes them."""
        return Reply(content or "", tuple(_call(call.get("function", call)) for call in tool_calls or ()))


def load_prompts(path: Path = PROMPTS_FILE) -> tuple[list[EvalPrompt], list[str]]:
    """The shipped prompts and plain texts. Raises: FileNotFoundError when the package was built without them."""
    data = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8"))
    return [EvalPrompt(**prompt) for prompt in data["prompts"]], data["texts"]


def read_reply(prompt: EvalPrompt, text: str) -> Reply | None:
    """What a completion (without its end token) says; None when it has not the form of an answer."""
    try:
        message = tiny_encoding.parse_message_from_completion_text(text + tiny_encoding.eos_token, prompt.mode)
    except ValueError:
        return None
    return Reply.of(message["content"], message["tool_calls"])


def is_right(prompt: EvalPrompt, reply: Reply | None) -> bool:
    """Whether the answer is the expected one; JSON may order its keys as it likes."""
    if reply is None:
        return False
    wanted = Reply.of(prompt.expected["content"], prompt.expected["tool_calls"])
    if prompt.set == "json":
        return _json(reply.content) == _json(wanted.content)
    return reply == wanted


def obeys_schema(prompt: EvalPrompt, reply: Reply | None) -> bool:
    """Whether the answer is JSON that fits the schema of its prompt, whatever its values."""
    assert prompt.schema is not None, "this prompt has no schema"
    return reply is not None and _fits(_json(reply.content), prompt.schema)


def shuffled(prompts: list[EvalPrompt]) -> list[EvalPrompt]:
    """Each prompt's last question behind the context of the next prompt of its list; prompts of a single turn are left out."""
    turns = [prompt for prompt in prompts if sum(m["role"] == "user" for m in prompt.messages) > 1]
    pairs = zip(turns, turns[1:] + turns[:1], strict=True)
    return [EvalPrompt(own.set, [*other.messages[:-1], own.messages[-1]], own.effort, own.expected) for own, other in pairs]


_BROKEN = object()  # equal to nothing but itself, and of no JSON type


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return _BROKEN


def _call(function: dict[str, Any]) -> tuple[str, Any]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        parsed = _json(arguments)
        arguments = arguments if parsed is _BROKEN else parsed
    return function["name"], arguments


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """The keywords that the prompts' schemas use: type, properties, required, additionalProperties, items."""
    unknown = set(schema) - {"type", "properties", "required", "additionalProperties", "items"}
    assert not unknown, f"schema keywords {sorted(unknown)} are not judged"
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if set(schema.get("required", ())) - set(value) or (schema.get("additionalProperties") is False and set(value) - set(properties)):
            return False
        return all(_fits(value[name], part) for name, part in properties.items() if name in value)
    if isinstance(value, list):
        return all(_fits(item, schema.get("items", {})) for item in value)
    return True
