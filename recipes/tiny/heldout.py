"""Held-out conversations of every family: other seeds, other list words, other sums. The last answer is what a score checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from recipes.tiny.chat import add_turn, chat, copying
from recipes.tiny.conversation import Conversation, choose_effort
from recipes.tiny.corpus import CHARS_PER_TOKEN, sample_from
from recipes.tiny.documents import document
from recipes.tiny.recall import recall
from recipes.tiny.records import records
from recipes.tiny.tools import KNOWN, NO_TOOLS, call_turn, invent, schema
from recipes.tiny.words import Source

SEED = "held-out 7"


@dataclass(frozen=True, slots=True)
class Example:
    """ids of the whole conversation; the answer is ids[answer:] and ends with EOS."""

    name: str
    conversation: Conversation
    ids: np.ndarray
    answer: int


def _chars(family: str, tokens: int) -> int:
    return int(tokens * CHARS_PER_TOKEN[family])


def _one_sum(source: Source, thinking: bool) -> Conversation:
    c = Conversation(effort=choose_effort(source, 1.0) if thinking else None, family="addition")
    add_turn(c, source)
    return c


def _one_call(source: Source, answered: bool) -> Conversation:
    """One tool request; ends with the call or with the answer from its result."""
    c = Conversation(effort=choose_effort(source, 0.3), family="tool")
    tools = {
        t.name: t for t in (invent(source) if source.chance(0.6) else source.rng.choice(KNOWN) for _ in range(source.rng.randint(1, 4)))
    }
    call_turn(c, source, source.rng.choice(list(tools.values())))
    if not answered:
        c.messages = c.messages[:2]
    c.system(source.rng.choice(("", "You are a helpful assistant.")), tools=[schema(t) for t in tools.values()])
    return c


def _no_tools(source: Source) -> Conversation:
    """A request for a tool although none is offered, as `tool_choice: none` renders it."""
    names = {tool.name for tool in KNOWN}
    while True:
        c = _one_call(source, answered=False)
        called = c.messages[-1]["tool_calls"][0]["function"]["name"]
        if called in names and called != "get_time":
            break
    out = Conversation(effort=c.effort, family="tool")
    out.user(c.messages[1]["content"])
    out.assistant(NO_TOOLS, "No tool fits.")
    return out


SETS: dict[str, Callable[[Source], Conversation]] = {
    **{f"recall_{n}": (lambda s, n=n: recall(s, _chars("recall", n), early=True)) for n in (128, 500, 2000, 6000)},
    **{f"document_{n}": (lambda s, n=n: document(s, _chars("document", n), num_questions=s.rng.randint(1, 3))) for n in (500, 2000, 6000)},
    "tool_call": lambda s: _one_call(s, answered=False),
    "tool_answer": lambda s: _one_call(s, answered=True),
    "tool_none": _no_tools,
    "json": lambda s: records(s, 0, turns=1),
    "addition": lambda s: _one_sum(s, False),
    "addition_thinking": lambda s: _one_sum(s, True),
    "copy": lambda s: copying(s, 300),
    "chat": lambda s: chat(s, 0),
}
LENGTHS = {f"{family}_{n}": n for family, n in [("recall", 128), *((f, n) for f in ("recall", "document") for n in (500, 2000, 6000))]}


def example(name: str, number: int) -> Example:
    """One held-out example; sets with a length keep to it within a quarter."""
    attempt = 0
    while True:
        source = Source(f"{SEED}/{name}/{number}/{attempt}", held_out=True)
        c = SETS[name](source)
        ids = sample_from(c).ids
        assistant = np.flatnonzero(ids == 5)[-1]
        want = LENGTHS.get(name)
        if want is None or abs(len(ids) - want) <= want / 4 or attempt > 40:
            return Example(name, c, ids, int(assistant) + 2)
        attempt += 1


def examples(count: int, long_count: int) -> Iterator[Example]:
    """`count` examples of every set, `long_count` of those from 2,000 tokens on."""
    for name in SETS:
        for number in range(long_count if LENGTHS.get(name, 0) >= 2000 else count):
            yield example(name, number)
