"""What a client's schema or pattern may be, before anything compiles it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import BadRequest
from server.schema_limits import MAX_DEPTH, MAX_NODES, MAX_PATTERN_BYTES, check_ebnf, check_pattern, explicit_schema


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def refusal(schema: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        explicit_schema(schema, "field")
    assert (caught.value.status, caught.value.code) == (400, "invalid_schema")
    return caught.value


def test_what_a_schema_leaves_unsaid_is_said_and_the_clients_object_is_untouched() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}, "b": {"properties": {}, "additionalProperties": {}}}}
    assert explicit_schema(schema, "field") == {
        "type": "object",
        "properties": {"a": {"type": "array", "items": True}, "b": {"properties": {}, "additionalProperties": {}}},
        "additionalProperties": False,
    }
    assert schema["properties"]["a"] == {"type": "array"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (nested(MAX_DEPTH + 1), "field.items"),
        ({"enum": list(range(MAX_NODES))}, "field has more than"),
        ({"description": "x" * 300_000}, "field has 3"),
        ({"properties": {"a": {"not": {}}}}, "field.properties.a.not"),
        ({"$defs": {"d": {"items": [1]}}}, "field.$defs.d.items"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "field.anyOf[1].uniqueItems"),
        ({"allOf": [{}, {}]}, "field.allOf"),
        ({"$ref": "http://example.com/schema"}, "field.$ref"),
        ({"$ref": "other.json#/a"}, "field.$ref"),
        ({"maxLength": 10_001}, "field.maxLength"),
        ({"minItems": -1}, "field.minItems"),
        ({"minItems": 1.5}, "field.minItems"),
        ({"minItems": True}, "field.minItems"),
        ({"pattern": "a{1,99999}"}, "field.pattern"),
        ({"pattern": "a" * (MAX_PATTERN_BYTES + 1)}, "field.pattern"),
        ({"patternProperties": {"a{99999}": {}}}, "field.patternProperties"),
        ({"properties": []}, "field.properties"),
        ({"anyOf": {}}, "field.anyOf"),
        ({"items": "x"}, "field.items"),
        ({"required": "a"}, "field.required"),
        ({"enum": []}, "field.enum"),
        ({"type": "string", "pattern": '"'}, "field cannot be enforced"),
        ([], "field must be"),
    ],
)
def test_a_schema_over_a_limit_is_refused_and_the_place_is_named(schema: Any, place: str) -> None:
    assert refusal(schema).message.startswith(place)


def test_limits_themselves_are_accepted() -> None:
    explicit_schema(nested(MAX_DEPTH), "field")
    explicit_schema({"enum": list(range(MAX_NODES - 1)), "maxLength": 10_000}, "field")
    check_pattern("a{0,10000}", "regex")


def test_property_names_that_look_like_keywords_are_names() -> None:
    explicit_schema({"properties": {"not": {}, "if": {}, "$ref": {}, "maxLength": {"type": "integer"}}}, "field")


def test_data_that_looks_like_a_schema_is_data() -> None:
    schema = {"enum": [{"not": {}}], "default": {"$ref": "http://x"}}
    assert explicit_schema(schema, "field") == schema


@pytest.mark.parametrize("text", [None, 3, "", "x" * 300_000, "root ::= [a]{3, 99999}", "a{99999}", "a{ 99999 , }"])
def test_grammars_over_a_limit_are_refused(text: Any) -> None:
    with pytest.raises(BadRequest, match="ebnf"):
        check_ebnf(text, "ebnf")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "items", "properties", "anyOf", "allOf", "$ref", "pattern", "maxLength", "enum", "required", "x", "$defs"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_any_json_is_a_schema_or_a_400(schema: Any) -> None:
    with contextlib.suppress(BadRequest):
        explicit_schema(schema, "field")
