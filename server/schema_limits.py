"""What a client's schema, pattern or grammar may be before anything compiles it, and a schema made explicit for compiling.

Everything here is linear in the input; no client pattern is ever run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from engine.json_strings import check_strings
from server.errors import BadRequest

MAX_SCHEMA_BYTES = 256 * 2**10
MAX_PATTERN_BYTES = 4 * 2**10
MAX_DEPTH = 32
MAX_NODES = 2_000
MAX_REPEAT = 10_000

# Keywords that the grammar could not enforce: taking them would promise what is not kept.
_UNENFORCED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems", "propertyNames")
_REPEAT = re.compile(r"\{\s*(\d{0,12})\s*(?:,\s*(\d{0,12})\s*)?\}")


def explicit_schema(schema: Any, where: str) -> Any:
    """A checked copy in which what is unsaid is said: objects with properties have no others, array items may be anything.

    where: the request field that holds the schema; errors name the place inside it.
    Raises:
        BadRequest: `invalid_schema`, over a limit or with a keyword that no grammar enforces.
    """
    try:
        size = len(json.dumps(schema))
    except RecursionError:
        raise _refuse(where, f"is nested deeper than {MAX_DEPTH}") from None
    if size > MAX_SCHEMA_BYTES:
        raise _refuse(where, f"has {size} bytes; at most {MAX_SCHEMA_BYTES} are accepted")
    explicit = _Walk(where).schema(schema, where, 0)
    try:
        check_strings(explicit)
    except ValueError as error:
        raise _refuse(where, f"cannot be enforced: {error}") from error
    return explicit


@dataclass(slots=True)
class _Walk:
    """One pass over a schema; counts its nodes: subschemas and enumerated values."""

    root: str
    num_nodes: int = 0

    def schema(self, schema: Any, where: str, depth: int) -> Any:
        self._count(where, 1)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refuse(where, "must be an object or a boolean")
        if depth > MAX_DEPTH:
            raise _refuse(where, f"is nested deeper than {MAX_DEPTH}")
        self._check_keywords(schema, where)
        copy = dict(schema)
        for name in _MAPS:
            if name in schema:
                copy[name] = self._map(schema[name], f"{where}.{name}", depth, patterns=name == "patternProperties")
        for name in _LISTS:
            if name in schema:
                copy[name] = self._list(schema[name], f"{where}.{name}", depth)
        for name in _SINGLES:
            if name in schema:
                copy[name] = self.schema(schema[name], f"{where}.{name}", depth + 1)
        return _say_defaults(copy)

    def _map(self, value: Any, where: str, depth: int, *, patterns: bool) -> Any:
        if not isinstance(value, dict):
            raise _refuse(where, "must be an object")
        if patterns:
            for pattern in value:
                check_pattern(pattern, where)
        return {name: self.schema(item, f"{where}.{name[:64]}", depth + 1) for name, item in value.items()}

    def _list(self, value: Any, where: str, depth: int) -> Any:
        if not isinstance(value, list):
            raise _refuse(where, "must be a list")
        return [self.schema(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]

    def _check_keywords(self, schema: dict[str, Any], where: str) -> None:
        for name in _UNENFORCED:
            if name in schema:
                raise _refuse(f"{where}.{name}", "is a keyword that cannot be enforced here")
        if schema.get("uniqueItems"):
            raise _refuse(f"{where}.uniqueItems", "is a keyword that cannot be enforced here")
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
            raise _refuse(f"{where}.allOf", "cannot be enforced with more than one entry: merge the schemas")
        reference = schema.get("$ref")
        if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
            raise _refuse(f"{where}.$ref", "must point inside the schema: #/...")
        if "pattern" in schema:
            check_pattern(schema["pattern"], f"{where}.pattern")
        for name in _COUNTS:
            self._check_count(schema.get(name), f"{where}.{name}")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refuse(f"{where}.required", "must be a list of strings")
        enum = schema.get("enum")
        if enum is not None and not (isinstance(enum, list) and enum):
            raise _refuse(f"{where}.enum", "must be a non-empty list")
        self._count(where, len(enum or []))

    @staticmethod
    def _check_count(value: Any, where: str) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise _refuse(where, "must be a whole number")
        if value > MAX_REPEAT:
            raise _refuse(where, f"must be at most {MAX_REPEAT}")

    def _count(self, where: str, nodes: int) -> None:
        self.num_nodes += nodes
        if self.num_nodes > MAX_NODES:
            raise _refuse(self.root, f"has more than {MAX_NODES} subschemas and enumerated values")


def _say_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" in schema and not any(name in schema for name in ("additionalProperties", "patternProperties", "propertyNames")):
        schema["additionalProperties"] = False
    kinds = schema.get("type")
    is_array = kinds == "array" or (isinstance(kinds, list) and "array" in kinds)
    if is_array and "items" not in schema and "prefixItems" not in schema:
        schema["items"] = True
    return schema


def check_pattern(pattern: Any, where: str) -> None:
    """Limits of a regular expression.

    Raises:
        BadRequest: `invalid_schema`.
    """
    _check_text(pattern, where, MAX_PATTERN_BYTES)


def check_ebnf(text: Any, where: str) -> None:
    """Limits of an EBNF grammar.

    Raises:
        BadRequest: `invalid_schema`.
    """
    _check_text(text, where, MAX_SCHEMA_BYTES)


def _check_text(text: Any, where: str, max_bytes: int) -> None:
    if not isinstance(text, str) or not text:
        raise _refuse(where, "must be a non-empty string")
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise _refuse(where, f"has {size} bytes; at most {max_bytes} are accepted")
    for match in _REPEAT.finditer(text):
        if any(number and int(number) > MAX_REPEAT for number in match.groups()):
            raise _refuse(where, f"repeats more than {MAX_REPEAT} times")


def _refuse(where: str, why: str) -> BadRequest:
    return BadRequest(where[:256], f"{where[:256]} {why}", "invalid_schema")
