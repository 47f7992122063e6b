"""A copy of a conversation in which client text cannot spell a control token, at unchanged length.

Rendering both shows which control spellings of a prompt are the encoder's own: those that stand at the same place in both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from server.conversation import Message, call_arguments
from server.errors import BadRequest

_BAR = "｜"  # U+FF5C occurs in every control spelling but those in angle brackets
# Private characters of the basic plane, and those of the two planes that hold nothing else.
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


def spells_control(messages: list[Message], spellings: Iterable[str]) -> bool:
    """Whether any client string might hold a control spelling."""
    needles = _needles(spellings)
    return any(needle in text for text in client_strings(messages) for needle in needles)


def neutralise(messages: list[Message], spellings: Iterable[str]) -> list[Message]:
    """The conversation with every bar and every bar-less control spelling replaced by private characters of the same length.

    Raises:
        BadRequest: the text holds so many private characters that none is left to stand in.
    """
    needles = _needles(spellings)
    used = {char for text in client_strings(messages) for char in set(text)}
    # Characters that no client string holds: otherwise two different keys of one object could become equal.
    free = list(islice(_unused(used), len(needles)))
    if len(free) < len(needles):
        raise BadRequest("messages", "the text holds every private character of Unicode, and control-token spellings")
    stand_ins = {needle: char * len(needle) for needle, char in zip(needles, free, strict=True)}
    pattern = re.compile("|".join(re.escape(needle) for needle in sorted(needles, key=len, reverse=True)))
    return _map_messages(messages, lambda text: pattern.sub(lambda match: stand_ins[match.group()], text))


def _unused(used: set[str]) -> Iterator[str]:
    return (char for code in chain(*_PRIVATE) if (char := chr(code)) not in used)


def _needles(spellings: Iterable[str]) -> list[str]:
    return [_BAR, *sorted(spelling for spelling in spellings if _BAR not in spelling)]


def client_strings(messages: list[Message]) -> Iterator[str]:
    """Every string of the client that reaches the prompt. Arguments count as they read after JSON decoding."""
    seen: list[str] = []

    def note(text: str) -> str:
        seen.append(text)
        return text

    for message in messages:
        _map_messages([message], note)
        yield from seen
        seen.clear()


def _map_messages(messages: list[Message], change: Callable[[str], str]) -> list[Message]:
    return [_map_message(message, change) for message in messages]


def _map_message(message: Message, change: Callable[[str], str]) -> Message:
    result = dict(message)
    content = message["content"]
    if isinstance(content, str):
        result["content"] = change(content)
    else:
        result["content"] = [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]
    if "reasoning_content" in message:
        result["reasoning_content"] = change(message["reasoning_content"])
    if "tool_calls" in message:
        result["tool_calls"] = [_map_call(call, change) for call in message["tool_calls"]]
    for name in ("tools", "response_format"):
        if name in message:
            result[name] = _map_value(message[name], change, keep=name == "tools")
    return result


def _map_call(call: Message, change: Callable[[str], str]) -> Message:
    function = call["function"]
    arguments = _map_value(call_arguments(function["arguments"]), change)
    return {**call, "function": {"name": change(function["name"]), "arguments": arguments}}


def _map_value(value: Any, change: Callable[[str], str], keep: bool = False) -> Any:
    """Every string inside a JSON value, keys included. `keep` leaves the keys of the outer objects that the encoder reads alone."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_value(item, change, keep) for item in value]
    if isinstance(value, dict):
        if keep:
            return {key: _map_value(item, change, keep=key == "function") for key, item in value.items()}
        return {change(key): _map_value(item, change) for key, item in value.items()}
    return value
