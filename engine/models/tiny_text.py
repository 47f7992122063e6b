"""Text from which the embedded model's tokenizer is trained: conversations that we make up, and the standard library's words.

Everything is deterministic for one Python version. The tokenizer itself is shipped as a file, so other versions of the
standard library change nothing for a user.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.models import tiny_encoding

# Word lists, sentence templates and the names of the library modules that are read. In templates {n} is a person, {c} a city, {j} a job,
# {t} a thing, {o} a color, {m} an animal, {a} an adjective, {v} a verb, {w} any noun, {d} a number, {k} a code, {y} a date.
LISTS: dict[str, Any] = json.loads(Path(__file__).with_name("tiny_words.json").read_text(encoding="utf-8"))
FIELDS: list[str] = LISTS["fields"].split()
SOURCE_MODULES: list[str] = LISTS["source_modules"].split()


class _Words:
    """Fills the one-letter slots of templates."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        kinds = {"n": "names", "c": "cities", "j": "jobs", "t": "things", "o": "colors", "m": "animals", "a": "adjectives", "v": "verbs"}
        self.lists = {kind: LISTS[name].split() for kind, name in kinds.items()}
        self.lists["w"] = [word for kind in "tmo" for word in self.lists[kind]]

    def fill(self, template: str) -> str:
        return re.sub(r"\{(\w)\}", lambda match: self.word(match.group(1)), template)

    def word(self, kind: str) -> str:
        rng = self.rng
        if kind == "d":
            return str(rng.randint(0, 10 ** rng.randint(1, 4)))
        if kind == "k":
            return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(4, 8)))
        if kind == "y":
            return f"{rng.randint(1990, 2030)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        return rng.choice(self.lists[kind])

    def value(self) -> object:
        rng = self.rng
        scalar = rng.choice(
            [self.word("c"), self.word("n"), self.word("t"), rng.randint(0, 999), rng.random() < 0.5, round(rng.random() * 100, 2), None]
        )
        return rng.choice([scalar, scalar, scalar, [self.word("w"), self.word("w")], {rng.choice(FIELDS): scalar}])

    def record(self, fields: list[str]) -> dict[str, object]:
        return {field: self.value() for field in fields}


def _tool(words: _Words) -> dict[str, object]:
    rng = words.rng
    names = rng.sample(FIELDS, rng.randint(0, 3))
    kinds = ("string", "string", "integer", "number", "boolean", "array", "object")
    properties = {name: {"type": rng.choice(kinds), "description": words.fill("The {a} {t} to {v}.")} for name in names}
    name = rng.choice(LISTS["tool_names"].split()) if rng.random() < 0.7 else f"{words.word('v')}_{words.word('t')}"
    parameters = {"type": "object", "properties": properties, "required": names[:1]}
    return {
        "type": "function",
        "function": {"name": name, "description": words.fill("{v} the {t} of a {t}.").capitalize(), "parameters": parameters},
    }


def _tool_conversation(words: _Words) -> list[dict[str, object]]:
    rng = words.rng
    tools = [_tool(words) for _ in range(rng.randint(1, 4))]
    function = rng.choice(tools)["function"]
    assert isinstance(function, dict)
    arguments = {name: words.value() for name in function["parameters"]["properties"]}
    call = {"id": "c1", "type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return [
        {"role": "system", "content": "You are a helpful assistant.", "tools": tools},
        {"role": "user", "content": words.fill("Please {v} the {t} in {c}.")},
        {"role": "assistant", "content": "", "reasoning_content": "I need the tool " + function["name"] + ".", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps(words.record(rng.sample(FIELDS, 3))), "tool_call_id": "c1"},
        {"role": "assistant", "content": words.fill("The {t} is {a}: {d}."), "reasoning_content": "The result has the answer."},
    ]


def _recall_conversation(words: _Words) -> list[dict[str, object]]:
    rng = words.rng
    messages: list[dict[str, object]] = [{"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."}]
    for _ in range(rng.randint(2, 6)):
        fact, question, answer = rng.choice(LISTS["facts"])
        filler = " ".join(words.fill(rng.choice(LISTS["sentences"])) for _ in range(rng.randint(0, 4)))
        user, reply = (words.fill(text) for text in rng.choice(LISTS["chat"]))
        messages += [
            {"role": "user", "content": f"{words.fill(fact)} {filler}".strip()},
            {"role": "assistant", "content": "Noted."},
            {"role": "user", "content": rng.choice([words.fill(question), user])},
            {
                "role": "assistant",
                "content": rng.choice([words.fill(answer), reply]),
                "reasoning_content": words.fill("The user told me the {t} of {n}."),
            },
        ]
    return messages


def _document_conversation(words: _Words) -> list[dict[str, object]]:
    rng = words.rng
    fields = rng.sample(FIELDS, rng.randint(2, 4))
    rows = [[words.word("n")] + [str(words.word(rng.choice("cjowdky"))) for _ in fields] for _ in range(rng.randint(3, 10))]
    style = rng.randrange(5)
    if style == 0:
        text = "\n".join(",".join(row) for row in [["name", *fields], *rows])
    elif style == 1:
        text = "\n".join("| " + " | ".join(row) + " |" for row in [["name", *fields], ["---"] * (len(fields) + 1), *rows])
    elif style == 2:
        text = "\n\n".join("\n".join(f"{field}: {value}" for field, value in zip(["name", *fields], row, strict=True)) for row in rows)
    elif style == 3:
        text = "\n".join(
            f"{words.word('y')} {rng.randint(0, 23):02d}:{rng.randint(0, 59):02d} INFO {row[0]} {fields[0]}={row[1]}" for row in rows
        )
    else:
        text = "\n".join(json.dumps(dict(zip(["name", *fields], row, strict=True))) for row in rows)
    row = rng.choice(rows)
    return [
        {"role": "user", "content": f"Here is a document:\n\n{text}\n\nWhat is the {fields[0]} of {row[0]}?"},
        {"role": "assistant", "content": row[1]},
        {"role": "user", "content": f"And the {fields[-1]} of {row[0]}? Answer as JSON."},
        {"role": "assistant", "content": json.dumps({fields[-1]: row[-1]})},
    ]


def _json_conversation(words: _Words) -> list[dict[str, object]]:
    rng = words.rng
    record = words.record(rng.sample(FIELDS, rng.randint(2, 5)))
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in record},
        "required": list(record),
        "additionalProperties": False,
    }
    return [
        {"role": "system", "content": "Reply in JSON.", "response_format": schema},
        {"role": "user", "content": "Extract the fields: " + ", ".join(f"{key} is {value}" for key, value in record.items()) + "."},
        {"role": "assistant", "content": json.dumps(record, indent=rng.choice([None, 2]))},
    ]


def conversations(count: int, seed: int) -> Iterator[str]:
    """Rendered made-up conversations of all kinds."""
    words = _Words(random.Random(seed))
    makers = (
        _recall_conversation,
        _recall_conversation,
        _document_conversation,
        _tool_conversation,
        _tool_conversation,
        _json_conversation,
    )
    for _ in range(count):
        messages = words.rng.choice(makers)(words)
        yield tiny_encoding.encode_messages(messages, words.rng.choice(["chat", "thinking"]))


def library_texts() -> Iterator[str]:
    """Documentation topics, docstrings and a part of the source of the standard library."""
    yield from importlib.import_module("pydoc_data.topics").topics.values()
    for position, name in enumerate(SOURCE_MODULES):
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"the standard library has no module {name}"
        assert spec.origin is not None, f"module {name} has no source file"
        source = Path(spec.origin).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
        if position % 3 == 0:
            # Rulers and deep indentation would fill the vocabulary with runs of one character.
            yield re.sub(r"([-=#*+])\1{3,}| {17,}", r"\1\1\1", source)


def word_texts() -> Iterator[str]:
    """Everyday words, alone and with a blank in front, the frequent ones more often."""
    for rank, word in enumerate(LISTS["common_words"].split()):
        count = 200 + 40000 // (rank + 50)
        yield (f" {word}" * count) + f" {word.capitalize()}" * (count // 8) + f"\n{word.capitalize()}" * (count // 8)


def training_texts(seed: int = 1) -> Iterator[str]:
    """Pieces between control tokens, as the tokenizer's trainer wants them."""
    control = re.compile("|".join(re.escape(token) for token in control_tokens()))
    for text in [*conversations(6000, seed), *library_texts(), *word_texts()]:
        yield from (piece for piece in control.split(text) if piece)


def control_tokens() -> list[str]:
    """Control spellings in the order of their ids, 0 to 17. The last one fills drafted positions and has no meaning in text."""
    e = tiny_encoding
    return [
        e.bos_token,
        e.eos_token,
        e.pad_token,
        e.system_token,
        e.user_token,
        e.assistant_token,
        e.latest_reminder_token,
        e.thinking_start_token,
        e.thinking_end_token,
        e.dsml_token,
        e.IMAGE_PLACEHOLDER,
        *e.TASK_TOKENS.values(),
        "<｜dspark▁noise｜>",
    ]
