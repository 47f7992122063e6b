"""Reading typed fields out of a JSON object. null means absent; types are strict, except that an integral float is an integer."""

from __future__ import annotations

import math
from typing import Any

from server.errors import BadRequest

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class Fields:
    """One object of a request; `prefix` is prepended to field names in errors."""

    def __init__(self, body: dict[str, Any], prefix: str = "") -> None:
        self.body = body
        self.prefix = prefix

    def raw(self, name: str) -> Any:
        return self.body.get(name)

    def fail(self, name: str, message: str, code: str = "invalid_value") -> BadRequest:
        where = self.prefix + name
        return BadRequest(where, f"{where} {message}", code)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "must be true or false")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self.raw(name)
        if value is None:
            return default
        number = as_integer(value)
        if number is None:
            raise self.fail(name, "must be an integer")
        if not low <= number <= high:
            raise self.fail(name, f"must be between {low} and {high}")
        return number

    def number(self, name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        """A finite number in [low, high], or (low, high] with `above`."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise self.fail(name, "must be a number")
        if not low <= value <= high or (above and value == low):
            raise self.fail(name, f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}")
        return float(value)

    def string(self, name: str, max_length: int) -> str | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.fail(name, "must be a string")
        if len(value) > max_length:
            raise self.fail(name, f"must have at most {max_length} characters")
        return value

    def object(self, name: str) -> Fields | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "must be an object")
        return Fields(value, f"{self.prefix}{name}.")

    def token_ids(self, name: str, vocab_size: int, max_items: int) -> tuple[int, ...]:
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > max_items:
            raise self.fail(name, f"must be a list of at most {max_items} token ids")
        return tuple(token_id(self, name, item, vocab_size) for item in value)


def as_integer(value: Any) -> int | None:
    """The integer that a JSON number means, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return None


def token_id(fields: Fields, name: str, value: Any, vocab_size: int) -> int:
    number = as_integer(value)
    if number is None or not 0 <= number < vocab_size:
        raise fields.fail(name, f"must hold token ids from 0 to {vocab_size - 1}")
    return number
