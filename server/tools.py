"""Tools, tool choice and response format of a chat request: checked, and rebuilt so that equal meaning gives equal prompts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from server.errors import BadRequest

MAX_TOOLS = 512
MAX_SCHEMA_BYTES = 2**20

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolChoice(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tools:
    """Declared tools in the encoder's form. `declared` is empty when `choice` is none.

    choice_name: the tool of a named choice. strict: names whose arguments must follow their schema.
    """

    declared: tuple[dict[str, Any], ...] = ()
    choice: ToolChoice = ToolChoice.AUTO
    choice_name: str = ""
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.declared)

    @property
    def forced(self) -> bool:
        """A call must follow."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """kind: "text", "json_object" or "json_schema". schema: of the answer, for json_schema."""

    kind: str = "text"
    schema: dict[str, Any] = field(default_factory=dict)

    @property
    def rendered(self) -> dict[str, Any] | None:
        """What the encoder prints at the end of the system message."""
        if self.kind == "text":
            return None
        return {"type": "json_object"} if self.kind == "json_object" else self.schema


def parse_tools(body: dict[str, Any], *, constrained: bool) -> Tools:
    """Fields `tools`, `tool_choice`, `parallel_tool_calls`. `constrained`: the engine can force a grammar.

    Raises:
        BadRequest: malformed, or it needs constrained decoding and there is none.
    """
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(name) is not None:
            raise BadRequest(name, f"{name} is not supported: use {instead}", "unsupported_parameter")
    raw = body.get("tools")
    if raw is not None and not isinstance(raw, list):
        raise BadRequest("tools", "tools must be a list")
    if raw and len(raw) > MAX_TOOLS:
        raise BadRequest("tools", f"tools has {len(raw)} entries; at most {MAX_TOOLS} are accepted")
    declared = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(raw or []))
    _check_set(declared)
    choice, choice_name = _choice(body.get("tool_choice"), {tool["function"]["name"] for tool in declared})
    strict = frozenset(tool["function"]["name"] for tool in raw or [] if tool["function"].get("strict"))
    if choice is ToolChoice.NONE:
        declared, strict = (), frozenset()
    if choice in (ToolChoice.REQUIRED, ToolChoice.NAMED) and not constrained:
        raise BadRequest("tool_choice", "a forced tool choice needs constrained decoding, which is not available", "unsupported_parameter")
    if strict and not constrained:
        name = min(strict)
        raise BadRequest("tools", f"strict arguments of {name} need constrained decoding, which is not available", "unsupported_parameter")
    return Tools(declared, choice, choice_name, _parallel(body.get("parallel_tool_calls")), strict)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """The tool with exactly the keys that are printed, in their order. The schema itself is not touched."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise BadRequest(f"{where}.type", f"{where}.type must be function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{where}.function", f"{where}.function must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(f"{where}.function.name", f"{where}.function.name must be 1 to 64 letters, digits, underscores or dashes")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise BadRequest(f"{where}.function.description", f"{where}.function.description must be a string")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise BadRequest(
            f"{where}.function.parameters", f"{where}.function.parameters of {name} must be an object schema", "invalid_schema"
        )
    if not isinstance(function.get("strict"), bool | None):
        raise BadRequest(f"{where}.function.strict", f"{where}.function.strict must be a boolean")
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


def _check_set(declared: tuple[dict[str, Any], ...]) -> None:
    seen: set[str] = set()
    total = 0
    for i, tool in enumerate(declared):
        name = tool["function"]["name"]
        if name in seen:
            raise BadRequest(f"tools[{i}].function.name", f"two tools are called {name}")
        seen.add(name)
        total += len(json.dumps(tool["function"]["parameters"]))
    if total > MAX_SCHEMA_BYTES:
        raise BadRequest("tools", f"the schemas of all tools are {total} bytes; at most {MAX_SCHEMA_BYTES} are accepted")


def _choice(raw: Any, names: set[str]) -> tuple[ToolChoice, str]:
    if raw is None:
        return ToolChoice.AUTO, ""
    if isinstance(raw, str) and raw in ("auto", "none"):
        return ToolChoice(raw), ""
    if raw == "required":
        if not names:
            raise BadRequest("tool_choice", "tool_choice required needs tools")
        return ToolChoice.REQUIRED, ""
    function = raw.get("function") if isinstance(raw, dict) and raw.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadRequest("tool_choice", "tool_choice must be auto, none, required or an object that names a function")
    if name not in names:
        raise BadRequest("tool_choice", "tool_choice names a function that is not among tools")
    return ToolChoice.NAMED, name


def _parallel(raw: Any) -> bool:
    if raw is not None and not isinstance(raw, bool):
        raise BadRequest("parallel_tool_calls", "parallel_tool_calls must be a boolean")
    return raw is not False


def parse_response_format(raw: Any, *, constrained: bool) -> ResponseFormat:
    """Field `response_format`.

    Raises:
        BadRequest: malformed, of a kind that is not offered, or in need of constrained decoding while there is none.
    """
    if raw is None:
        return ResponseFormat()
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind == "text":
        return ResponseFormat()
    if kind not in ("json_object", "json_schema"):
        raise BadRequest("response_format.type", "response_format.type must be text, json_object or json_schema")
    schema: Any = {}
    if kind == "json_schema":
        wrapper = raw.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if not isinstance(schema, dict):
            raise BadRequest("response_format.json_schema.schema", "response_format.json_schema.schema must be an object", "invalid_schema")
    if not constrained:
        raise BadRequest("response_format", f"{kind} needs constrained decoding, which is not available", "unsupported_parameter")
    return ResponseFormat(str(kind), schema)
