"""Documents of several layouts with questions before or after them, for one or two fields of an entry."""

from __future__ import annotations

import json

from recipes.tiny.conversation import Conversation, add_system, choose_effort, reason
from recipes.tiny.words import FIELD_VALUES, Source

KEYS = {"name": Source.name, "id": lambda s: s.digits(4), "code": Source.code, "order": lambda s: s.digits(5), "project": Source.project}
ONE_FIELD = (
    "What is the {f} of {k}?",
    "Give me the {f} of {k}.",
    "Which {f} does {k} have?",
    "Find the {f} of {k}.",
    "Tell me the {f} for {k}.",
    "Look up {k}: which {f}?",
)
TWO_FIELDS = (
    "What are the {f} and the {g} of {k}?",
    "Give me the {f} and the {g} of {k}.",
    "Which {f} and which {g} does {k} have?",
    "Look up the {f} and the {g} of {k}.",
)
LEADS = ("Here is a document:", "Read this:", "This is our list:", "Data:", "Here are the records:")


class Table:
    """Rows with a unique key and one to four fields."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.key = source.rng.choice(list(KEYS))
        names = [name for name in FIELD_VALUES if name != self.key]
        self.fields = source.rng.sample(names, source.rng.choice((1, 2, 2, 3, 3, 4)))
        self.rows: dict[str, list[str]] = {}
        self.style = source.rng.choice((_csv, _markdown, _key_values, _log, _json_lines, _prose))

    def grow(self, chars: int) -> str:
        """Add rows until the text has about `chars` characters."""
        source, per_row = self.source, 1
        while True:
            for _ in range(per_row):
                key = KEYS[self.key](source)
                if key not in self.rows:
                    self.rows[key] = [str(FIELD_VALUES[f](source)) for f in self.fields]
            text = self.style(self)
            if len(text) >= chars and len(self.rows) >= 3:
                return text
            per_row = max(1, int((chars - len(text)) * len(self.rows) / max(len(text), 1) * 0.9))


def _csv(t: Table) -> str:
    return "\n".join(",".join(row) for row in [[t.key, *t.fields], *([k, *v] for k, v in t.rows.items())])


def _markdown(t: Table) -> str:
    rows = [[t.key, *t.fields], ["---"] * (1 + len(t.fields)), *([k, *v] for k, v in t.rows.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _key_values(t: Table) -> str:
    return "\n\n".join(
        "\n".join(f"{f}: {v}" for f, v in zip([t.key, *t.fields], [k, *values], strict=True)) for k, values in t.rows.items()
    )


def _log(t: Table) -> str:
    stamp = t.source.rng.randint(0, 10**6)
    lines = []
    for i, (k, values) in enumerate(t.rows.items()):
        at = stamp + 37 * i
        lines.append(
            f"{at // 3600 % 24:02d}:{at // 60 % 60:02d}:{at % 60:02d} INFO {k} "
            + " ".join(f"{f}={v}" for f, v in zip(t.fields, values, strict=True))
        )
    return "\n".join(lines)


def _json_lines(t: Table) -> str:
    return "\n".join(json.dumps(dict(zip([t.key, *t.fields], [k, *values], strict=True))) for k, values in t.rows.items())


def _prose(t: Table) -> str:
    return " ".join(
        f"The {t.key} {k} has " + " and ".join(f"the {f} {v}" for f, v in zip(t.fields, values, strict=True)) + "."
        for k, values in t.rows.items()
    )


def _question(t: Table, source: Source, two: float) -> tuple[str, str, str]:
    """Question, answer and the reasoning that names the entry."""
    key = source.rng.choice(list(t.rows))
    values = dict(zip(t.fields, t.rows[key], strict=True))
    why = f"I look for {key}."
    if len(t.fields) > 1 and source.chance(two):
        f, g = source.rng.sample(t.fields, 2)
        text = source.rng.choice(TWO_FIELDS).format(f=f, g=g, k=key)
        return text, f"The {f} of {key} is {values[f]} and the {g} is {values[g]}.", why
    f = source.rng.choice(t.fields)
    return source.rng.choice(ONE_FIELD).format(f=f, k=key), f"The {f} of {key} is {values[f]}.", why


def document(
    source: Source, target_chars: int, thinking: float = 0.15, num_questions: int | None = None, before: float = 0.35
) -> Conversation:
    """One document of about `target_chars` characters and several questions; the last answer is what a score checks."""
    c = Conversation(effort=choose_effort(source, thinking), family="document")
    table = Table(source)
    text = table.grow(max(80, target_chars - 300))
    count = num_questions or source.rng.randint(3, 10) + min(len(table.rows) // 6, 30)
    question, answer, why = _question(table, source, 0.35)
    lead = source.rng.choice(LEADS)
    c.user(f"{question}\n\n{lead}\n\n{text}" if source.chance(before) else f"{lead}\n\n{text}\n\n{question}")
    c.assistant(answer, reason(c, why))
    for _ in range(count - 1):
        question, answer, why = _question(table, source, 0.3)
        c.user(question)
        c.assistant(answer, reason(c, why))
    add_system(c, source)
    return c
