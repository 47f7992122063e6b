"""What strings under a schema may hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar_compiler import GrammarCompiler
from engine.json_strings import check_strings, needs_escape
from engine.request import Grammar, GrammarKind
from engine.structured_output import Matcher


@pytest.mark.parametrize(
    "pattern", ['"', 'a|"', r"\\", r"\n", r"[\n]", '["]', r"\x22", r"\u0022", r"\u{22}", r"\x1f", r"\cA", "\x01", r"a\tb", r"\0"]
)
def test_single_characters_that_json_escapes_are_noticed(pattern: str) -> None:
    assert needs_escape(pattern)


@pytest.mark.parametrize(
    "pattern", [r"[^\"\\]*", r'["b]', r"\w+\s?", r"[\x00-\x1f]", r"a\.b", r"\x41", r"[^\n]", "é{2,3}", "", "[", r"\x", r"\u{", "[^"]
)
def test_other_patterns_pass(pattern: str) -> None:
    assert not needs_escape(pattern)


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('[]^\\"xu0{}n-ac\n'), max_size=12))
def test_any_text_is_looked_at_without_an_exception(pattern: str) -> None:
    assert needs_escape(pattern) in (True, False)


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether the compiled schema takes the text as a whole, byte by byte."""
    compiler = GrammarCompiler([bytes([byte]) for byte in range(256)] + [b"<end>"], [256])
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    matcher = Matcher(compiler.compile(grammar), grammar, [256], 257)
    return all(matcher.accept(token) for token in [*text.encode(), 256])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": ["string", "null"], "minLength": 1, "maxLength": 3},
        {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 3}, {"type": "string", "minLength": 1, "maxLength": 2}]},
    ],
)
def test_strings_with_lengths_hold_only_characters_that_need_no_escape(schema: dict[str, Any]) -> None:
    assert [accepts(schema, json.dumps("é" * length, ensure_ascii=False)) for length in range(5)] == [False, True, True, True, False]
    assert accepts(schema, '"😀/~"')
    for code in [*range(32), 34, 92]:
        assert not accepts(schema, f'"{chr(code)}"')


def test_property_names_with_lengths_are_json_too() -> None:
    schema = {"type": "object", "propertyNames": {"type": "string", "maxLength": 2}, "additionalProperties": {"type": "null"}}
    assert accepts(schema, '{"ab": null}')
    assert not accepts(schema, '{"\x01": null}')
    assert not accepts(schema, '{"abc": null}')


def test_names_and_data_are_not_read_as_keywords() -> None:
    check_strings({"properties": {"pattern": {}, "maxLength": {}}, "enum": [{"pattern": '"'}], "default": {"pattern": "a", "maxLength": 1}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a", "maxLength": 3},
        {"type": "string", "format": "date", "minLength": 3},
        {"items": {"anyOf": [{"pattern": '"'}]}},
        {"patternProperties": {"\\n": {}}},
    ],
)
def test_what_cannot_be_enforced_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"pattern|minLength"):
        check_strings(schema)
