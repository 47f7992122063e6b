"""From a chat request to a grammar: what it lets through is what the output parser reads as the wanted answer, and nothing else."""

from __future__ import annotations

import contextlib
import json
import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar_compiler import GrammarCompiler, check_schema_text, vocabulary_bytes
from engine.request import GrammarKind
from engine.structured_output import Matcher, num_words, unpack
from server.constraints import Constraint, chat_constraint, plain_constraint
from server.encoding import ControlIds, control_ids
from server.errors import BadRequest
from server.output_parser import DeltaKind, OutputParser
from server.rendering import ParseStart, RenderedPrompt, RenderOptions, render_chat
from tests.server.vectors import loaded

VOCAB = 4096
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "unit": {"enum": ["c", "f", ""]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/Place"},
        },
        "required": ["city", "days", "place"],
        "$defs": {"Place": {"type": "object", "properties": {"inside": {"type": "boolean"}}, "required": ["inside"]}},
    },
}
PING = {"name": "ping", "parameters": {"type": "object", "properties": {}}}
BARE = {"name": "bare"}


def tool(function: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**function, **extra}}


@lru_cache(maxsize=1)
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary_bytes(loaded()[1], VOCAB), [1])


@lru_cache(maxsize=1)
def controls() -> ControlIds:
    encoder, tokenizer = loaded()
    return control_ids(encoder.dialect, tokenizer)


def chat(thinking: bool = False, **fields: Any) -> tuple[RenderedPrompt, Constraint | None]:
    encoder, tokenizer = loaded()
    body = {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "enabled" if thinking else "disabled"}, **fields}
    rendered = render_chat(encoder, tokenizer, body, RenderOptions(constrained=True))
    return rendered, chat_constraint(body, rendered, encoder.dialect, controls(), constrained=True)


def constrained(thinking: bool = False, **fields: Any) -> tuple[RenderedPrompt, Constraint]:
    rendered, constraint = chat(thinking, **fields)
    assert constraint is not None
    for part in constraint.parts:
        check_schema_text(part.schema)
    return rendered, constraint


def matcher_of(constraint: Constraint) -> Matcher:
    return Matcher(compiler().compile(constraint.grammar), constraint.grammar, [controls().eos], VOCAB)


def allowed(matcher: Matcher) -> list[int]:
    mask = torch.full((num_words(VOCAB),), -1, dtype=torch.int32)
    matcher.fill(mask)
    return list(unpack(mask[None], VOCAB)[0].nonzero()[:, 0].tolist())


def generate(constraint: Constraint, seed: int, start: list[int] | None = None) -> list[int]:
    """A random output of the grammar that ends as soon as it may. start: the free text before the grammar."""
    matcher, choose, eos = matcher_of(constraint), random.Random(seed), controls().eos
    output = list(start or [])
    matcher.follow(output)
    for _ in range(3000):
        options = allowed(matcher)
        # Tags are more probable than text, so that free values end some time.
        ends = [t for t in options if t in (eos, controls().dsml)]
        token = choose.choice(ends) if ends and choose.random() < 0.6 else choose.choice(options)
        assert matcher.accept(token)
        output.append(token)
        if token == eos:
            return output
        if controls().dsml not in options and choose.random() < 0.3:
            for piece in loaded()[1].encode_plain("</"):  # a closing tag now and then
                if piece in allowed(matcher):
                    assert matcher.accept(piece)
                    output.append(piece)
    raise AssertionError("the grammar does not come to an end")


def read(rendered: RenderedPrompt, output: list[int]) -> tuple[str, list[tuple[str, Any]], OutputParser]:
    """(content, calls as (name, arguments), the parser)."""
    encoder, tokenizer = loaded()
    parser = OutputParser(
        encoder.dialect, tokenizer, start=rendered.start, parse_calls=rendered.parse_tools, tool_names=rendered.tools.names
    )
    content, calls = "", []
    for delta in parser.push(output) + parser.finish():
        if delta.kind is DeltaKind.CONTENT:
            content += delta.text
        elif delta.kind is DeltaKind.TOOL_START:
            calls.append([delta.text, ""])
        elif delta.kind is DeltaKind.TOOL_ARGUMENTS:
            calls[delta.call_index][1] += delta.text
    return content, [(name, json.loads(arguments)) for name, arguments in calls], parser


def check_weather(arguments: dict[str, Any]) -> None:
    assert {"city", "days", "place"} <= arguments.keys() <= WEATHER["parameters"]["properties"].keys()
    assert isinstance(arguments["city"], str)
    assert arguments["days"] in range(1, 10)
    assert arguments.get("unit", "c") in ("c", "f", "")
    assert arguments.get("note") is None or isinstance(arguments["note"], str)
    assert arguments["place"] in ({"inside": True}, {"inside": False})


def check_call(name: str, arguments: dict[str, Any]) -> None:
    if name == "get_weather":
        check_weather(arguments)
    else:
        assert name in ("ping", "bare")
        assert arguments == {}


ALL = [tool(WEATHER), tool(PING), tool(BARE)]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_required_choice_gives_well_formed_calls_that_follow_their_schemas(thinking: bool, seed: int) -> None:
    rendered, constraint = constrained(thinking, tools=ALL, tool_choice="required")
    start = [*loaded()[1].encode("Hm <tag>"), controls().think_end] if thinking else []
    content, calls, parser = read(rendered, generate(constraint, seed, start))
    assert content == ""
    assert len(calls) == parser.complete_calls >= 1
    assert parser.finish_reason == "tool_calls"
    assert parser.counts.malformed_calls == parser.counts.undeclared_calls == parser.counts.invalid_json_values == 0
    for name, arguments in calls:
        check_call(name, arguments)


@pytest.mark.parametrize("seed", range(3))
def test_a_named_choice_gives_exactly_one_call_of_that_tool(seed: int) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    rendered, constraint = constrained(tools=ALL, tool_choice=choice)
    _, calls, _ = read(rendered, generate(constraint, seed))
    assert [name for name, _ in calls] == ["get_weather"]
    check_weather(calls[0][1])


def test_without_parallel_calls_the_block_closes_behind_the_first() -> None:
    rendered, constraint = constrained(tools=ALL, tool_choice="required", parallel_tool_calls=False)
    assert all(len(read(rendered, generate(constraint, seed))[1]) == 1 for seed in range(6))


@pytest.mark.parametrize("seed", range(6))
def test_with_a_response_format_and_tools_the_answer_is_either_json_or_calls(seed: int) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    response = {"type": "json_schema", "json_schema": {"schema": schema}}
    rendered, constraint = constrained(tools=ALL, response_format=response)
    content, calls, _ = read(rendered, generate(constraint, seed))
    assert bool(content) != bool(calls)
    assert not content or json.loads(content) in ({"ok": True}, {"ok": False})
    for name, _arguments in calls:
        assert name in ("get_weather", "ping", "bare")


def test_strict_tools_leave_the_answer_free_until_a_tag_begins() -> None:
    rendered, constraint = constrained(tools=[tool(WEATHER, strict=True), tool(PING)])
    matcher = matcher_of(constraint)
    assert len(allowed(matcher)) == VOCAB
    start = [*loaded()[1].encode("Let me see.\n\n<"), controls().dsml]
    content, calls, parser = read(rendered, generate(constraint, 1, start))
    assert content == "Let me see."
    assert parser.finish_reason == "tool_calls"
    for name, arguments in calls:
        assert name != "get_weather" or check_weather(arguments) is None


def test_calls_as_the_encoder_writes_them_are_in_the_grammar() -> None:
    encoder, tokenizer = loaded()
    calls = [
        ("get_weather", {"city": 'a"<\n', "unit": "f", "days": 3, "note": None, "place": {"inside": True}}),
        ("get_weather", {"city": "", "days": 9, "note": "xyz", "place": {"inside": False}}),
        ("ping", {}),
        ("bare", {}),
    ]
    made = [{"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for i, (n, a) in enumerate(calls)]
    prompt, _ = encoder.encode([{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": made}], thinking=False)
    written = prompt.split(encoder.dialect.think_end)[-1]
    _, constraint = constrained(tools=ALL, tool_choice="required")
    opener = encoder.dialect.spell(f"\n\n{encoder.dialect.tags.calls_open}\n")
    assert written.startswith(opener)
    matcher = matcher_of(constraint)
    for token in tokenizer.encode(written.removeprefix(opener)):
        assert matcher.accept(token), f"token {tokenizer.token_bytes(token)!r} behind {matcher.num_tokens}"
    assert matcher.num_tokens > 100


def test_in_thinking_mode_neither_end_nor_calls_come_before_the_reasoning_is_over() -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"tools": ALL, "tool_choice": "required"}, {"regex": "a+"}):
        _, constraint = constrained(True, **fields)
        grammar = constraint.grammar
        assert (grammar.trigger_token_ids, set(grammar.reserved_token_ids)) == ((controls().think_end,), {controls().eos, controls().dsml})
        _, constraint = constrained(False, **fields)
        assert (constraint.grammar.trigger_token_ids, constraint.grammar.reserved_token_ids) == ((), ())


@pytest.mark.parametrize("fields", [{}, {"tools": ALL}, {"tools": ALL, "tool_choice": "none"}, {"response_format": {"type": "text"}}])
def test_a_request_without_constraints_has_no_grammar(fields: dict[str, Any]) -> None:
    assert chat(**fields)[1] is None


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"regex": "[ab]+"}, GrammarKind.REGEX),
        ({"ebnf": 'root ::= "x"'}, GrammarKind.EBNF),
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}}, GrammarKind.JSON_SCHEMA),
        ({"response_format": {"type": "json_object"}, "tools": ALL, "tool_choice": "none"}, GrammarKind.JSON_OBJECT),
    ],
)
def test_plain_constraints_keep_their_kind(fields: dict[str, Any], kind: GrammarKind) -> None:
    assert constrained(**fields)[1].grammar.kind is kind


def function_with(parameters: dict[str, Any]) -> dict[str, Any]:
    return tool({"name": "f", "parameters": {"type": "object", **parameters}}, strict=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": "root ::= x"}, "regex"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"regex": "a", "tools": ALL}, "regex"),
        ({"ebnf": 3}, "ebnf"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format.json_schema.schema.not"),
        ({"tools": [function_with({"properties": {"a": {"not": {}}}})]}, "tools[0].function.parameters.properties.a.not"),
        ({"tools": [function_with({"anyOf": [{}]})]}, "tools"),
        ({"tools": [function_with({"properties": {'a"b': {}}})]}, "tools"),
        ({"tools": [function_with({"properties": {"a": {"$ref": "#/$defs/none"}}})]}, "tools"),
        ({"tools": [function_with({"properties": {"a": {"$ref": "#/properties/a"}}})]}, "tools"),
        ({"tools": [function_with({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}})]}, "tools"),
        ({"tools": [function_with({"properties": {}, "required": ["a"]})]}, "tools"),
    ],
)
def test_contradictions_and_schemas_without_a_form_are_400(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_a_continued_answer_cannot_be_constrained() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": '{"a', "prefix": True}]
    with pytest.raises(BadRequest, match="continued"):
        chat(messages=messages, response_format={"type": "json_object"})


def test_plain_completions_take_the_same_fields() -> None:
    assert plain_constraint({"prompt": "x"}, constrained=True) is None
    regex = plain_constraint({"regex": "a"}, constrained=True)
    assert regex is not None
    assert regex.grammar.kind is GrammarKind.REGEX
    with pytest.raises(BadRequest) as caught:
        plain_constraint({"regex": "a"}, constrained=False)
    assert caught.value.code == "unsupported_parameter"


VALUES = st.sampled_from(
    [
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "[ab]{1,2}"},
        {"type": ["string", "null"], "maxLength": 2},
        {"type": "boolean"},
        {"type": "integer", "minimum": -9, "maximum": 9},
        {"enum": ["x", 3, None, "y z"]},
        {"const": {"k": [1, "v"]}},
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        {"oneOf": [{"type": "boolean"}, {"const": "maybe"}]},
    ]
)


@settings(max_examples=25, deadline=None)
@given(
    properties=st.dictionaries(st.sampled_from(["a", "b b", "ключ", "c<"]), VALUES, min_size=1, max_size=4),
    required=st.sets(st.sampled_from(["a", "b b", "ключ", "c<"])),
    seed=st.integers(0, 1000),
)
def test_arguments_of_any_small_schema_are_complete_and_of_the_right_kinds(
    properties: dict[str, Any], required: set[str], seed: int
) -> None:
    needed = sorted(required & properties.keys())
    function = {"name": "f", "parameters": {"type": "object", "properties": properties, "required": needed}}
    rendered, constraint = constrained(tools=[tool(function)], tool_choice="required")
    assert rendered.start is ParseStart.BLOCK
    _, calls, parser = read(rendered, generate(constraint, seed))
    assert parser.counts.invalid_json_values == parser.counts.malformed_calls == 0
    for _, arguments in calls:
        assert set(needed) <= arguments.keys() <= properties.keys()
        for name, value in arguments.items():
            check_value(value, properties[name])


KEYWORDS = [
    "type",
    "items",
    "properties",
    "anyOf",
    "$ref",
    "pattern",
    "maxLength",
    "enum",
    "const",
    "required",
    "$defs",
    "additionalProperties",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 20) | st.sampled_from(["string", "object", "array", "#/$defs/a", "a", '"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=4),
    max_leaves=14,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYWORDS), JSON, max_size=4))
def test_any_parameters_compile_or_are_refused_and_nothing_else_is_raised(parameters: dict[str, Any]) -> None:
    with contextlib.suppress(BadRequest, ValueError):
        _, constraint = constrained(tools=[tool({"name": "f", "parameters": parameters}, strict=True)], tool_choice="required")
        compiler().compile(constraint.grammar)


def check_value(value: Any, schema: dict[str, Any]) -> None:
    if "enum" in schema:
        assert value in schema["enum"]
    elif "const" in schema:
        assert value == schema["const"]
    elif "oneOf" in schema:
        assert isinstance(value, bool) or value == "maybe"
    elif "pattern" in schema:
        assert set(value) <= {"a", "b"}
        assert 1 <= len(value) <= 2
    else:
        kinds = {"string": str, "boolean": bool, "integer": int, "array": list, "null": type(None)}
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert isinstance(value, tuple(kinds[kind] for kind in types))
