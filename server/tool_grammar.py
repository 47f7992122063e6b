"""The grammar of a calls block in the model's own dialect, built from the declared tools.

It is written in xgrammar's structural tags: constant texts, single tokens, patterns and JSON schemas, in sequence or as alternatives.
The control token inside a tag is matched by its id, so that spelled-out tags in values stay text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from server.dialect import DSML, Dialect
from server.errors import BadRequest

Format = dict[str, Any]
Schema = Any  # a JSON schema: an object or a boolean

_ANY_TEXT: Format = {"type": "grammar", "grammar": "root ::= [^]*"}
_NOTHING: Format = {"type": "grammar", "grammar": 'root ::= ""'}
_NAME: Format = {"type": "regex", "pattern": '[^"<>\\n]{1,128}'}
_MAX_ALTERNATIVES = 64
_MAX_REFERENCES = 32
_MAX_DEFINITION_BYTES = 4 * 2**20  # all copies of definitions in one grammar
_DEFINITIONS = ("$defs", "definitions")


def literal(text: str) -> Format:
    """A text, with the control token given by its id where `DSML` stands."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def json_value(schema: Schema, max_whitespace: int) -> Format:
    """A JSON value of a schema that passed its checks."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": max_whitespace}


class CallGrammar:
    """Formats of calls in one dialect. dsml_id: the control token of the tags. max_whitespace: blanks between JSON tokens."""

    def __init__(self, dialect: Dialect, dsml_id: int, max_whitespace: int) -> None:
        self._tags = dialect.tags
        self._dsml: Format = {"type": "token", "token": dsml_id}
        self._max_whitespace = max_whitespace
        self._definition_bytes = 0

    def block(self, tools: list[tuple[dict[str, Any], bool]], *, one_call: bool) -> Format:
        """What follows the opening tag and its newline: calls and the closing tag.

        tools: (function object, whether its arguments follow the schema). one_call: exactly one call.
        Raises:
            BadRequest: parameters that have no form in the dialect.
        """
        calls = either(*(self._call(function, by_schema) for function, by_schema in tools))
        return sequence(calls if one_call else {"type": "plus", "content": calls}, *self._tagged(self._tags.calls_close))

    def opener(self) -> Format:
        """The opening tag behind an answer's text."""
        return sequence(*self._tagged(f"\n\n{self._tags.calls_open}\n"))

    def opener_behind_control(self) -> Format:
        """The rest of the opening tag, behind its control token."""
        return literal(self._tags.calls_open.partition(DSML)[2] + "\n")

    def _tagged(self, text: str) -> list[Format]:
        parts: list[Format] = []
        for i, piece in enumerate(text.split(DSML)):
            parts += [self._dsml] if i else []
            parts += [literal(piece)] if piece else []
        return parts

    def _call(self, function: dict[str, Any], by_schema: bool) -> Format:
        tags, name = self._tags, function["name"]
        schema = function["parameters"]
        if not by_schema:
            arguments = {"type": "star", "content": self._free_parameter(True, {}, name)}
        else:
            arguments = self._arguments(resolve(schema, schema, name), schema, name)
        return sequence(*self._tagged(f'{tags.invoke_open}{name}">\n'), arguments, *self._tagged(f"{tags.invoke_close}\n"))

    def _arguments(self, schema: Schema, root: Schema, tool: str) -> Format:
        """Parameters in declared order. A call without any has an empty line instead."""
        if schema is True or schema == {}:
            return literal("\n")
        if not isinstance(schema, dict) or any(name in schema for name in ("anyOf", "oneOf", "allOf", "patternProperties")):
            raise _refuse(tool, "parameters must list their properties at the top level")
        properties = schema.get("properties", {})
        required = frozenset(schema.get("required", ()))
        undeclared = sorted(required - properties.keys())
        if undeclared:
            raise _refuse(tool, f"the required parameter {undeclared[0][:64]!r} is not among the properties")
        parts = [self._parameter(name, value, root, tool, name in required) for name, value in properties.items()]
        others = schema.get("additionalProperties", not properties and "properties" not in schema)
        if others is not False:
            parts.append({"type": "star", "content": self._free_parameter(others, root, tool)})
        if not parts:
            return literal("\n")
        return sequence(*parts) if required else either(literal("\n"), sequence(*parts))

    def _parameter(self, name: str, schema: Schema, root: Schema, tool: str, required: bool) -> Format:
        if '"' in name or "\n" in name:
            raise _refuse(tool, "a parameter name with a quote or a line break has no form in a call")
        forms = self._limited_forms(schema, root, tool, f"the parameter {name[:64]!r} has")
        content = either(*(self._value(name, *form) for form in forms))
        return content if required else {"type": "optional", "content": content}

    def _free_parameter(self, schema: Schema, root: Schema, tool: str) -> Format:
        forms = self._limited_forms(schema, root, tool, "undeclared parameters have")
        values = [self._value_behind(*form) for form in forms]
        return sequence(*self._tagged(self._tags.parameter_open), _NAME, either(*values))

    def _value(self, name: str, raw: bool, content: Format) -> Format:
        return sequence(*self._tagged(self._tags.parameter_open + name), self._value_behind(raw, content))

    def _value_behind(self, raw: bool, content: Format) -> Format:
        attribute = "true" if raw else "false"
        return sequence(literal(f'" string="{attribute}">'), content, *self._tagged(f"{self._tags.parameter_close}\n"))

    def _limited_forms(self, schema: Schema, root: Schema, tool: str, whose: str) -> list[tuple[bool, Format]]:
        """All forms of a value. References double with every definition, so they are never listed to the end."""
        forms = list(islice(self._forms(schema, root, tool, 0), _MAX_ALTERNATIVES + 1))
        if len(forms) > _MAX_ALTERNATIVES:
            raise _refuse(tool, f"{whose} too many alternatives")
        return forms

    def _forms(self, schema: Schema, root: Schema, tool: str, depth: int) -> Iterator[tuple[bool, Format]]:
        """How a value may be written: (raw text, its format) or (JSON, its format)."""
        schema = resolve(schema, root, tool)
        if depth > _MAX_REFERENCES:
            raise _refuse(tool, "the schema refers to itself without end")
        branches = _branches(schema)
        if branches is not None:
            for branch in branches:
                yield from self._forms(branch, root, tool, depth + 1)
            return
        values = _enumerated(schema)
        if values is not None:
            yield from (_constant(value) for value in values)
            return
        if schema is True or not (isinstance(schema, dict) and "type" in schema):
            yield True, _ANY_TEXT
            yield False, self._json(schema, root, tool)
        elif schema["type"] == "string" and "format" not in schema:
            yield True, _raw_text(schema)
        else:
            yield False, self._json(schema, root, tool)

    def _json(self, schema: Schema, root: Schema, tool: str) -> Format:
        """A JSON value; definitions travel along where it refers to them, since references count from the schema's own root."""
        references = list(_references(schema))
        if not references:
            return json_value(schema, self._max_whitespace)
        definitions = {name: root[name] for name in _DEFINITIONS if name in root}
        for reference in [*references, *_references(definitions)]:
            resolve({"$ref": reference}, root, tool)
        self._definition_bytes += len(json.dumps(definitions))
        if self._definition_bytes > _MAX_DEFINITION_BYTES:
            raise _refuse(tool, "too many parameters refer to large definitions")
        return json_value({**schema, **definitions}, self._max_whitespace)


def _references(value: Any) -> Iterator[Any]:
    """Every `$ref` inside a JSON value."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


def resolve(schema: Schema, root: Schema, tool: str) -> Schema:
    """Follow references to definitions until something else stands there.

    Raises:
        BadRequest: a reference that leads nowhere, in a circle, or to another place than a definition.
    """
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        target: Any = root
        steps = str(schema["$ref"]).split("/")
        if steps[0] != "#" or len(steps) != 3 or steps[1] not in _DEFINITIONS:
            raise _refuse(tool, "a $ref must name a definition: #/$defs/...")
        for step in steps[1:]:
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if target is None:
            raise _refuse(tool, f"the reference {str(schema['$ref'])[:64]!r} leads nowhere")
        schema = target
    raise _refuse(tool, "the schema refers to itself without end")


def _branches(schema: Schema) -> list[Schema] | None:
    """The alternatives of a schema that is nothing but alternatives."""
    if not isinstance(schema, dict):
        return None
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name) and "properties" not in schema:
            return list(schema[name])
    kinds = schema.get("type")
    if isinstance(kinds, list) and kinds and "enum" not in schema and "const" not in schema:
        return [{**schema, "type": kind} for kind in kinds]
    return None


def _enumerated(schema: Schema) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def _constant(value: Any) -> tuple[bool, Format]:
    if isinstance(value, str):
        return True, literal(value) if value else _NOTHING
    return False, {"type": "json_schema", "json_schema": {"const": value}}


def _raw_text(schema: dict[str, Any]) -> Format:
    if "pattern" in schema:
        return {"type": "regex", "pattern": schema["pattern"]}
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
    if low == 0 and high is None:
        return _ANY_TEXT
    return {"type": "grammar", "grammar": f"root ::= [^]{{{low},{'' if high is None else int(high)}}}"}


def _refuse(tool: str, why: str) -> BadRequest:
    return BadRequest("tools", f"tool {tool}: {why}", "invalid_schema")
