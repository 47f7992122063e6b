"""JSON schemas whose strings need no care: rewritten where the grammar library would let text through that is not JSON.

The library takes a string with length limits, and a single character of a pattern, as raw text between the quotes. Length limits become
patterns over characters that need no escape, and patterns that ask for a character that needs one are refused.
"""

from __future__ import annotations

from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_PLAIN = r'[^"\\\x00-\x1f\ud800-\udfff]'
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
_HEX_DIGITS = {"x": 2, "u": 4}


def safe_strings(schema: Any) -> Any:
    """A copy of a JSON schema whose grammar generates valid JSON only.

    Raises:
        ValueError: a pattern asks for a character that JSON escapes, or is combined with a length.
    """
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            copy[name] = {key: safe_strings(value) for key, value in schema[name].items()}
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            copy[name] = [safe_strings(value) for value in schema[name]]
    for name in _SINGLES:
        if name in schema:
            copy[name] = safe_strings(_typed(schema[name]) if name == "propertyNames" else schema[name])
    for pattern in [schema.get("pattern"), *(schema.get("patternProperties") or {})]:
        if isinstance(pattern, str) and needs_escape(pattern):
            raise ValueError("a pattern may not ask for quotes, backslashes or control characters inside JSON")
    return _without_lengths(copy)


def _typed(schema: Any) -> Any:
    """The schema of property names, which are strings whether it says so or not."""
    return {"type": "string", **schema} if isinstance(schema, dict) and ("minLength" in schema or "maxLength" in schema) else schema


def _without_lengths(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type")
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]) or not ("minLength" in schema or "maxLength" in schema):
        return schema
    if "pattern" in schema or "format" in schema:
        raise ValueError("minLength and maxLength cannot be combined with a pattern or format: put the length into the pattern")
    low, high = schema.pop("minLength", 0), schema.pop("maxLength", None)
    if high is not None and low > high:
        raise ValueError(f"minLength {low} is greater than maxLength {high}")
    schema["pattern"] = f"^{_PLAIN}{{{int(low)},{'' if high is None else int(high)}}}$"
    return schema


def needs_escape(pattern: str) -> bool:
    """Whether a regular expression names, outside a set of several characters, one that JSON strings escape. Linear in its length."""
    position = 0
    while position < len(pattern):
        if pattern[position] == "[":
            members, negated, position = _members(pattern, position + 1)
            if not negated and len(members) == 1 and _escaped_in_json(members[0]):
                return True
            continue
        char, position = _character(pattern, position)
        if _escaped_in_json(char):
            return True
    return False


def _members(pattern: str, position: int) -> tuple[list[str], bool, int]:
    """Characters of a set, whether it is negated, and the position behind it."""
    negated = pattern[position : position + 1] == "^"
    position += negated
    members: list[str] = []
    while position < len(pattern) and pattern[position] != "]":
        char, position = _character(pattern, position)
        members.append(char)
    return members, negated, position + 1


def _character(pattern: str, position: int) -> tuple[str, int]:
    """The character at a position, escapes decoded, and the position behind it. Character classes count as their letter."""
    char = pattern[position]
    if char != "\\" or position + 1 == len(pattern):
        return char, position + 1
    letter = pattern[position + 1]
    position += 2
    if letter == "c":
        return "\0", position + 1
    if letter not in _HEX_DIGITS:
        return _ESCAPES.get(letter, letter), position
    end = pattern.find("}", position) if pattern[position : position + 1] == "{" else position + _HEX_DIGITS[letter]
    digits = pattern[position:end].lstrip("{")
    try:
        return chr(int(digits, 16)), end + (pattern[end : end + 1] == "}" and pattern[position] == "{")
    except (ValueError, OverflowError):
        return letter, position


def _escaped_in_json(char: str) -> bool:
    return char in '"\\' or char < " "
