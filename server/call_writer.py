"""The `arguments` text of one tool call, written piece by piece as its parameters are generated."""

from __future__ import annotations

import json
from dataclasses import dataclass

_DECLARED_JSON = '"false'


@dataclass(slots=True)
class ParseCounts:
    """What went wrong in the output, for the metrics."""

    malformed_calls: int = 0
    undeclared_calls: int = 0
    invalid_json_values: int = 0
    duplicate_parameters: int = 0


class CallWriter:
    """Names and values to JSON text: `": "` and `", "` between them, order and duplicates kept, values never re-serialised."""

    def __init__(self, counts: ParseCounts) -> None:
        self._counts = counts
        self._names: set[str] = set()

    def string_start(self, name: str) -> str:
        """Opens a string value, which `string_piece` continues."""
        return self._key(name) + '"'

    @staticmethod
    def string_piece(text: str) -> str:
        """Raw text inside a JSON string; pieces can be escaped one by one."""
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def value(self, name: str, text: str, kind: str) -> str:
        """A complete value, unchanged when it is JSON and a JSON string otherwise, so that the arguments stay readable.

        kind: what the tag's `string` attribute says, from its opening quote on; "" without one.
        """
        if is_json(text):
            return self._key(name) + text
        if kind == _DECLARED_JSON:
            self._counts.invalid_json_values += 1
        return self._key(name) + json.dumps(text, ensure_ascii=False)

    def close(self) -> str:
        return "}" if self._names else "{}"

    def _key(self, name: str) -> str:
        lead = ", " if self._names else "{"
        if name in self._names:
            self._counts.duplicate_parameters += 1
        self._names.add(name)
        return f"{lead}{json.dumps(name, ensure_ascii=False)}: "


def is_json(text: str) -> bool:
    """Whether a strict reader accepts it. Numbers are not converted: their length has no limit here."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
