"""JSON replies by a schema or a list of keys, from values scattered over sentences."""

from __future__ import annotations

import json
from typing import Any

from recipes.tiny.conversation import Conversation, choose_effort, reason
from recipes.tiny.tools import _spoken
from recipes.tiny.words import FIELD_VALUES, Source

PHRASES = ("the {f} is {v}", "{f}: {v}", "{f} {v}", "with {f} {v}", "its {f} is {v}")
OPENINGS = (
    "Please extract the record:",
    "Here is a record:",
    "Fill in the fields.",
    "We got this message:",
    "Extract:",
    "Turn this into JSON:",
)
INTEGERS = ("quantity", "level", "speed", "score", "age", "count", "limit", "year")
NUMBERS = ("price", "amount", "total", "weight", "rate", "size")
FLAGS = ("paid", "urgent", "active", "new", "public", "sold")
LISTS = ("tags", "colors", "guests", "items", "files")


def _field(source: Source, nested: bool = True) -> tuple[str, dict[str, Any], Any, str]:
    """Field name, schema, value and the value as a sentence writes it."""
    rng, draw = source.rng, source.rng.random()
    if draw < 0.45:
        name = rng.choice([f for f in FIELD_VALUES if f not in INTEGERS + NUMBERS])
        value: Any = str(FIELD_VALUES[name](source))
        return name, {"type": "string"}, value, value
    if draw < 0.62:
        value = rng.randint(0, 5000)
        return rng.choice(INTEGERS), {"type": "integer"}, value, str(value)
    if draw < 0.74:
        value = round(rng.uniform(1, 500), rng.randint(1, 2))
        return rng.choice(NUMBERS), {"type": "number"}, value, str(value)
    if draw < 0.86:
        value = source.chance(0.5)
        return rng.choice(FLAGS), {"type": "boolean"}, value, _spoken(value)
    if draw < 0.94 or not nested:
        value = [rng.choice((source.made_up, source.name))() for _ in range(rng.randint(1, 3))]
        return rng.choice(LISTS), {"type": "array", "items": {"type": "string"}}, value, _spoken(value)
    inner = {}
    while len(inner) < 2:
        name, kind, value, text = _field(source, nested=False)
        inner[name] = (kind, value, text)
    schema = {"type": "object", "properties": {n: k for n, (k, _, _) in inner.items()}, "required": list(inner)}
    spoken = " and ".join(f"{n} {t}" for n, (_, _, t) in inner.items())
    return rng.choice(("details", "contact", "address", "owner_data")), schema, {n: v for n, (_, v, _) in inner.items()}, spoken


def _draw(source: Source) -> dict[str, tuple[dict[str, Any], Any, str]]:
    """Fields of one record: name -> schema, value, spoken value."""
    fields: dict[str, tuple[dict[str, Any], Any, str]] = {}
    for _ in range(source.rng.choice((1, 2, 3, 3, 4, 5, 6, 7))):
        name, kind, value, text = _field(source)
        fields.setdefault(name, (kind, value, text))
    return fields


def _sentence(source: Source, fields: dict[str, tuple[dict[str, Any], Any, str]]) -> str:
    told = list(fields)
    source.rng.shuffle(told)
    sentence = ", ".join(source.rng.choice(PHRASES).format(f=f, v=fields[f][2]) for f in told)
    return f"{sentence[0].upper()}{sentence[1:]}."


def records(source: Source, target_chars: int, thinking: float = 0.25, turns: int | None = None) -> Conversation:
    """One to four records for one schema; every record also tells fields that are not asked for."""
    c = Conversation(effort=choose_effort(source, thinking), family="json")
    fields = _draw(source)
    keep = source.rng.sample(list(fields), source.rng.randint(max(1, len(fields) - 2), min(5, len(fields))) if len(fields) <= 5 else 5)
    schema: dict[str, Any] = {"type": "object", "properties": {f: fields[f][0] for f in keep}, "required": keep}
    if source.chance(0.5):
        schema["additionalProperties"] = False
    by_schema = source.chance(0.8)
    for turn in range(turns or source.rng.choice((1, 1, 2, 4))):
        if turn:
            fields = _again(source, fields)
        text = f"{source.rng.choice(OPENINGS)} {_sentence(source, fields)}" if source.chance(0.8) else _sentence(source, fields)
        c.user(text if by_schema else f"{text} Reply in JSON with the keys {', '.join(keep)}.")
        c.assistant(json.dumps({f: fields[f][1] for f in keep}, ensure_ascii=False), reason(c, "I fill in the fields."))
    text = source.rng.choice(("Reply in JSON.", "", "You are a helpful assistant.", "Extract data as JSON."))
    c.system(text, response_format=schema if by_schema else {"type": "json_object"})
    return c


def _again(source: Source, fields: dict[str, tuple[dict[str, Any], Any, str]]) -> dict[str, tuple[dict[str, Any], Any, str]]:
    """The same fields with new values."""
    found = {}
    for name, (kind, value, text) in fields.items():
        if kind["type"] == "object":
            found[name] = (kind, value, text)
        elif kind["type"] == "string":
            new = str(FIELD_VALUES[name](source))
            found[name] = (kind, new, new)
        else:
            new_value: Any = {
                "integer": lambda: source.rng.randint(0, 5000),
                "number": lambda: round(source.rng.uniform(1, 500), 2),
                "boolean": lambda: source.chance(0.5),
                "array": lambda: [source.made_up() for _ in range(source.rng.randint(1, 3))],
            }[kind["type"]]()
            found[name] = (kind, new_value, _spoken(new_value))
    return found
