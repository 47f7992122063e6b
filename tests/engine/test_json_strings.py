"""Rewritten schemas: what their strings may hold."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.json_strings import needs_escape, safe_strings


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


@pytest.mark.parametrize("schema", [{"type": "string", "minLength": 1, "maxLength": 3}, {"type": ["string", "null"], "maxLength": 2}])
def test_lengths_become_a_pattern_of_plain_characters(schema: dict[str, Any]) -> None:
    safe = safe_strings(schema)
    assert "maxLength" not in safe
    low, high = schema.get("minLength", 0), schema["maxLength"]
    for length in range(5):
        assert bool(re.fullmatch(safe["pattern"], "é" * length)) == (low <= length <= high)
    assert not any(re.fullmatch(safe["pattern"], bad) for bad in ('"', "\\", "\n", "\x01"))


def test_only_schemas_are_rewritten_and_not_names_or_data() -> None:
    schema = {
        "type": "object",
        "properties": {"maxLength": {"type": "integer"}, "pattern": {"type": "string", "maxLength": 1}},
        "enum": [{"type": "string", "maxLength": 1}],
        "default": {"type": "string", "maxLength": 1},
    }
    safe = safe_strings(schema)
    assert safe["properties"]["maxLength"] == {"type": "integer"}
    assert "pattern" in safe["properties"]["pattern"]
    assert (safe["enum"], safe["default"]) == (schema["enum"], schema["default"])
    assert json.dumps(schema["properties"]["pattern"]) == '{"type": "string", "maxLength": 1}'


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a", "maxLength": 3},
        {"type": "string", "format": "date", "minLength": 3},
        {"type": "string", "minLength": 4, "maxLength": 3},
        {"items": {"anyOf": [{"pattern": '"'}]}},
        {"patternProperties": {"\\n": {}}},
    ],
)
def test_what_cannot_be_made_safe_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"pattern|minLength"):
        safe_strings(schema)
