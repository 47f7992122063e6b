"""Strings of JSON schemas, where the grammar library would let text through that is not JSON.

It takes a single character of a pattern, and every character of a string with length limits, as raw text between the quotes.
"""

from __future__ import annotations

import re
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
_HEX_DIGITS = {"x": 2, "u": 4}
# One character of a string with length limits, as the library prints its rule, and without those that JSON escapes. An alternative for
# escapes would make every repetition of the rule slow.
_PRINTED = r"(([^\"\\\r\n]))"
_MENDED = r"(([^\"\\\0-\x1f]))"
_CHARACTER_RULE = re.compile(r"^(\S*characters(?:_\d+)* ::= )" + re.escape(_PRINTED) + "$", re.MULTILINE)


def check_strings(schema: Any) -> None:
    """Whether all strings of a JSON schema can be held to it.

    Raises:
        ValueError: a pattern asks for a character that JSON escapes, or is combined with a length.
    """
    if not isinstance(schema, dict):
        return
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            for value in schema[name].values():
                check_strings(value)
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            for value in schema[name]:
                check_strings(value)
    for name in _SINGLES:
        check_strings(schema.get(name))
    names = schema.get("patternProperties")
    for pattern in [schema.get("pattern"), *(names if isinstance(names, dict) else ())]:
        if isinstance(pattern, str) and needs_escape(pattern):
            raise ValueError("a pattern may not ask for quotes, backslashes or control characters inside JSON")
    if ("pattern" in schema or "format" in schema) and ("minLength" in schema or "maxLength" in schema):
        raise ValueError("minLength and maxLength cannot be combined with a pattern or format: put the length into the pattern")


def mend_characters(grammar: str) -> str:
    """A grammar in the library's EBNF in which strings with length limits hold only characters that JSON takes as they are."""
    return _CHARACTER_RULE.sub(lambda match: match[1] + _MENDED, grammar)


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
