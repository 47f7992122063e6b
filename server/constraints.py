"""Which grammar a request's output must follow: its response format, its forced or strict tools, or a pattern or grammar of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engine.grammar_compiler import JSON_OBJECT_SCHEMA, MAX_WHITESPACE
from engine.request import Grammar, GrammarKind
from server.dialect import Dialect
from server.encoding import ControlIds
from server.errors import BadRequest
from server.fields import Fields
from server.rendering import ParseStart, RenderedPrompt
from server.schema_limits import check_ebnf, check_pattern, explicit_schema
from server.tool_grammar import CallGrammar, Format, either, json_value, sequence
from server.tools import ResponseFormat, ToolChoice, Tools, parse_response_format

_SCHEMA_FIELD = "response_format.json_schema.schema"
EXTENSIONS = ("regex", "ebnf")
MAX_GRAMMAR_BYTES = 4 * 2**20  # written out from tools; its digest and its way to the worker block the event loop for 10 ms per MiB


@dataclass(frozen=True, slots=True)
class Part:
    """A schema that a grammar was built from, and the place in the request that holds it."""

    place: str
    schema: str


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that passed the limits and is not compiled yet. param: the field to blame when it cannot be compiled."""

    grammar: Grammar
    param: str
    parts: tuple[Part, ...] = ()


def chat_constraint(
    body: dict[str, Any], rendered: RenderedPrompt, dialect: Dialect, ids: ControlIds, *, constrained: bool
) -> Constraint | None:
    """The constraint of a chat request, None when its output is free. constrained: the engine follows grammars.

    Raises:
        BadRequest: `invalid_schema` over a limit or without a form in the dialect; `invalid_value` for combinations that contradict.
    """
    tools, response = rendered.tools, rendered.response_format
    extension = _extension(body, response, tools, constrained)
    if extension is None and response.kind == "text" and not tools.forced and not tools.strict:
        return None
    last = body["messages"][-1]
    if rendered.start is ParseStart.CONTENT and (body.get("continue_final_message") or last.get("prefix")):
        raise BadRequest("continue_final_message", "a continued answer cannot be constrained: its beginning may not fit the grammar")
    if extension is not None or (response.kind != "text" and not rendered.parse_tools):
        constraint = extension or _response(response)
    else:
        constraint = _with_tools(rendered, CallGrammar(dialect, ids.dsml, MAX_WHITESPACE))
    return _triggered(constraint, rendered, ids)


def plain_constraint(body: dict[str, Any], *, constrained: bool) -> Constraint | None:
    """The constraint of a plain completion: a response format, `regex` or `ebnf`.

    Raises:
        BadRequest: as `chat_constraint`.
    """
    response = parse_response_format(body.get("response_format"), constrained=constrained)
    return _extension(body, response, Tools(), constrained) or (None if response.kind == "text" else _response(response))


def _extension(body: dict[str, Any], response: ResponseFormat, tools: Tools, constrained: bool) -> Constraint | None:
    """Fields `regex` and `ebnf`, which are the whole answer's grammar and go with no other one."""
    given = [name for name in EXTENSIONS if body.get(name) is not None]
    if not given:
        return None
    name, fields = given[0], Fields(body)
    if not constrained:
        raise fields.fail(name, "needs constrained decoding, which is not available", "unsupported_parameter")
    if len(given) > 1 or response.kind != "text":
        raise fields.fail(name, "cannot be combined with another grammar or response_format")
    if tools.declared:
        raise fields.fail(name, "cannot be combined with tools")
    if name == "regex":
        check_pattern(body[name], name)
        return Constraint(Grammar(GrammarKind.REGEX, body[name]), name)
    check_ebnf(body[name], name)
    return Constraint(Grammar(GrammarKind.EBNF, body[name]), name)


def _response(response: ResponseFormat) -> Constraint:
    if response.kind == "json_object":
        return Constraint(Grammar(GrammarKind.JSON_OBJECT), "response_format")
    return Constraint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(explicit_schema(response.schema, _SCHEMA_FIELD))), _SCHEMA_FIELD)


def _with_tools(rendered: RenderedPrompt, calls: CallGrammar) -> Constraint:
    """Calls by force, calls as an alternative to a response format, or strict arguments in whatever calls the model makes."""
    tools, response = rendered.tools, rendered.response_format
    functions, parts = [], []
    for index, tool in enumerate(tools.declared):
        function = tool["function"]
        name = function["name"]
        if tools.choice is ToolChoice.NAMED and name != tools.choice_name:
            continue
        by_schema = tools.forced or name in tools.strict
        if by_schema:
            place = f"tools[{index}].function.parameters"
            function = {**function, "parameters": explicit_schema(function["parameters"], place)}
            parts.append(Part(f"{place} of {name}", json.dumps(function["parameters"])))
        functions.append((function, by_schema))
    one_call = not tools.parallel or tools.choice is ToolChoice.NAMED
    block = calls.block(functions, one_call=one_call)
    if rendered.start is ParseStart.BLOCK:
        form = block
    elif tools.forced:
        form = sequence(calls.opener(), block)
    elif response.kind == "text":
        form = sequence(calls.opener_behind_control(), block)
    else:
        schema, schema_parts = _response_schema(response)
        parts += schema_parts
        form = either(json_value(schema, MAX_WHITESPACE), sequence(calls.opener(), block))
    return Constraint(_tag(form), "tools", tuple(parts))


def _response_schema(response: ResponseFormat) -> tuple[Any, list[Part]]:
    if response.kind == "json_object":
        return json.loads(JSON_OBJECT_SCHEMA), []
    schema = explicit_schema(response.schema, _SCHEMA_FIELD)
    return schema, [Part(_SCHEMA_FIELD, json.dumps(schema))]


def _tag(form: Format) -> Grammar:
    text = json.dumps({"type": "structural_tag", "format": form})
    if len(text) > MAX_GRAMMAR_BYTES:
        why = f"tools: the grammar of all calls has {len(text)} bytes; at most {MAX_GRAMMAR_BYTES} are accepted: force fewer tools"
        raise BadRequest("tools", why, "invalid_schema")
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


def _triggered(constraint: Constraint, rendered: RenderedPrompt, ids: ControlIds) -> Constraint:
    """With the place where the grammar begins: at once, behind the reasoning, or at the first tag of a free answer."""
    trigger: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()
    free_answer = rendered.response_format.kind == "text" and bool(rendered.tools.strict) and not rendered.tools.forced
    if free_answer and constraint.param == "tools":
        trigger = (ids.dsml,)
    elif rendered.start is ParseStart.REASONING:
        # Neither an end nor a calls block may come before the reasoning is over: both would leave the grammar unused.
        trigger, reserved = (ids.think_end,), (ids.eos, ids.dsml)
    grammar = Grammar(constraint.grammar.kind, constraint.grammar.text, trigger, reserved)
    return Constraint(grammar, constraint.param, constraint.parts)
