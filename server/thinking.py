"""Thinking switch and effort of a chat request. Several fields may set them; the first in a fixed order wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.errors import BadRequest

# Spellings of other toolkits for the efforts of the release.
ALIASES = {"minimal": "low", "medium": "high", "xhigh": "high", "ultra": "max"}
_OFF = "none"


@dataclass(frozen=True, slots=True)
class Thinking:
    """enabled: the answer begins with reasoning. effort: what the encoder gets, None for its default. number: 1..100."""

    enabled: bool
    effort: str | int | None
    number: int


def parse_thinking(body: dict[str, Any], *, default: bool, efforts: Mapping[str, int], default_effort: int) -> Thinking:
    """Fields `thinking`, `reasoning`, `reasoning_effort` and `chat_template_kwargs`.

    efforts: effort name -> number, as the checkpoint's encoder defines them.
    Raises:
        BadRequest: a field has a value that means nothing.
    """
    thinking = _object(body, "thinking")
    reasoning = _object(body, "reasoning")
    template = _object(body, "chat_template_kwargs")
    switch = _switch(thinking, template)
    effort = next(
        (
            _effort(value, param, efforts)
            for value, param in (
                (body.get("reasoning_effort"), "reasoning_effort"),
                (reasoning.get("effort"), "reasoning.effort"),
                (thinking.get("effort"), "thinking.effort"),
                (template.get("reasoning_effort"), "chat_template_kwargs.reasoning_effort"),
            )
            if value is not None
        ),
        None,
    )
    if effort == _OFF:
        switch = False if switch is None else switch
        effort = None
    number = default_effort if effort is None else efforts[effort] if isinstance(effort, str) else effort
    return Thinking(default if switch is None else switch, effort, number)


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(name, f"{name} must be an object")
    return value


def _switch(thinking: dict[str, Any], template: dict[str, Any]) -> bool | None:
    kind = thinking.get("type")
    if kind is not None:
        if kind not in ("enabled", "disabled", "adaptive"):
            raise BadRequest("thinking.type", "thinking.type must be enabled, disabled or adaptive")
        return bool(kind != "disabled")
    for name in ("thinking", "enable_thinking"):
        value = template.get(name)
        if value is not None:
            if not isinstance(value, bool):
                raise BadRequest(f"chat_template_kwargs.{name}", f"chat_template_kwargs.{name} must be a boolean")
            return value
    return None


def _effort(value: Any, param: str, efforts: Mapping[str, int]) -> str | int:
    """An effort name of the encoder, a number, or "none"."""
    if isinstance(value, str):
        name = ALIASES.get(value, value)
        if name == _OFF or name in efforts:
            return name
        if value.isascii() and value.isdigit() and len(value) <= 3:
            value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100:
        return value
    names = ", ".join([*efforts, *ALIASES, _OFF])
    raise BadRequest(param, f"{param} must be an integer from 1 to 100 or one of: {names}")
