"""Synthetic coding-agent sessions in the Weka trace format, deterministic for a seed.

A session is a tree: a root stream of requests whose prompts grow, and helper streams that the root may wait for. Sizes and pauses are
drawn per session; block ids count up from 0, so that prompts share exactly the blocks that a real agent would send again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 64
MAIN, SIDE = "synthetic-main", "synthetic-side"
TOOL_TOKENS, SYSTEM_TOKENS = 512, 256  # declared at scale 1
PREFILL_TOK_S, DECODE_TOK_S, OVERHEAD_S = 9000, 90, 0.15  # the pretended recording server
Row = dict[str, Any]


class Session:
    """One session being written: its random stream, its block ids and its scale."""

    def __init__(self, name: str, seed: str, scale: float, time_scale: float) -> None:
        self.name, self.scale, self.time_scale = name, scale, time_scale
        self.random = random.Random(seed)
        self.num_blocks = 0

    def new_blocks(self, count: int) -> list[int]:
        self.num_blocks += max(0, count)
        return list(range(self.num_blocks - max(0, count), self.num_blocks))

    def tokens(self, low: int, high: int) -> int:
        return int(self.random.randint(low, high) * self.scale)

    def pause_s(self, low: float, high: float) -> float:
        return round(self.random.uniform(low, high) * self.time_scale, 3)

    def api_time_s(self, new_tokens: int, output_tokens: int) -> float:
        return round((OVERHEAD_S + new_tokens / PREFILL_TOK_S + output_tokens / DECODE_TOK_S) * self.time_scale, 3)


class Prompt:
    """A growing prompt: its length, and the ids of its full blocks."""

    def __init__(self, session: Session, prefix: list[int]) -> None:
        self.session, self.blocks, self.num_tokens = session, list(prefix), len(prefix) * BLOCK

    def grow(self, tokens: int) -> None:
        self.num_tokens += tokens
        self.blocks += self.session.new_blocks(self.num_tokens // BLOCK - len(self.blocks))

    def compact(self, kept_blocks: int, summary_tokens: int) -> None:
        """Cut back to a prefix and go on from a summary."""
        del self.blocks[kept_blocks:]
        self.num_tokens = kept_blocks * BLOCK
        self.grow(summary_tokens)


@dataclass(frozen=True, slots=True)
class Header:
    """Declared tool and system tokens, and how many blocks of the prompt they fill."""

    tools: int
    system: int

    @property
    def num_blocks(self) -> int:
        return (self.tools + self.system) // BLOCK


AfterTurn = Callable[[int, float, list[Row]], float | None]


@dataclass(frozen=True, slots=True)
class Call:
    """One request before it has a time: sizes, who asked, and what was fed in."""

    new_tokens: int
    output_tokens: int
    think_s: float | None
    model: str = MAIN
    streamed: bool = True
    stop: str = "tool_use"
    fed: str = "tool_result"

    def row(self, at_s: float, prompt: Prompt) -> tuple[Row, float]:
        """The trace row and the time at which the call ends."""
        took_s = prompt.session.api_time_s(self.new_tokens, self.output_tokens)
        row: Row = {
            "t": round(at_s, 3),
            "type": "s" if self.streamed else "n",
            "model": self.model,
            "in": prompt.num_tokens,
            "out": self.output_tokens,
            "hash_ids": list(prompt.blocks),
            "input_types": [self.fed],
            "output_types": ["text", "tool_use"] if self.stop == "tool_use" else ["text"],
            "stop": self.stop,
            "api_time": took_s,
        }
        if self.think_s is not None:
            row["think_time"] = self.think_s
        if self.streamed:
            row["ttft"] = round(0.3 * took_s, 3)
        return row, round(at_s + took_s, 3)


@dataclass(frozen=True, slots=True)
class Stream:
    """A chain of requests: how many, whether streamed, every how many turns a person types, what follows a turn."""

    count: int
    first_tokens: int
    streamed: bool = True
    user_every: int = 0
    after_turn: AfterTurn | None = None

    def rows(self, session: Session, at_s: float, prompt: Prompt) -> tuple[list[Row], float]:
        """Every later prompt holds the previous answer and one tool result. The order of random draws fixes the files' bytes."""
        rows: list[Row] = []
        previous_out = 0
        for turn in range(self.count):
            by_user = turn == 0 or (self.user_every > 0 and turn % self.user_every == 0)
            new, think_s = self.first_tokens, None
            if turn > 0:
                new = previous_out + session.tokens(60, 420)
                think_s = session.pause_s(0.2, 1.5)
                think_s = round(think_s + session.pause_s(3, 6), 3) if by_user else think_s
            prompt.grow(new)
            at_s += think_s or 0
            previous_out = session.tokens(24, 110)
            stop = "end_turn" if turn == self.count - 1 else "tool_use"
            call = Call(new, previous_out, think_s, MAIN, self.streamed, stop, "text" if by_user else "tool_result")
            row, at_s = call.row(at_s, prompt)
            rows.append(row)
            if self.after_turn is not None:
                at_s = self.after_turn(turn, at_s, rows) or at_s
        return rows, at_s


def helper(session: Session, at_s: float, number: int, prefix: list[int], count: int, kind: str, header: Header) -> tuple[Row, float]:
    """A helper's row and the time at which it ends."""
    stream = Stream(count, session.tokens(150, 400), streamed=False)
    rows, end_s = stream.rows(session, at_s, Prompt(session, prefix))
    row = {
        "t": round(at_s, 3),
        "type": "subagent",
        "agent_id": f"{kind.lower()}_{number:03d}",
        "subagent_type": kind,
        "duration_ms": round((end_s - at_s) * 1000),
        "total_tokens": sum(r["in"] + r["out"] for r in rows),
        "tool_use_count": count - 1,
        "status": "completed",
        "requests": rows,
        "models": [MAIN],
        "tool_tokens": header.tools,
        "system_tokens": header.system,
    }
    return row, end_s


def linear(session: Session, header: Header) -> list[Row]:
    """One stream, a person types every fourth turn."""
    prompt = Prompt(session, session.new_blocks(header.num_blocks))
    return Stream(10, session.tokens(300, 600), user_every=4).rows(session, 0.0, prompt)[0]


def one_helper(session: Session, header: Header) -> list[Row]:
    """The root waits for one helper."""
    prefix = session.new_blocks(header.num_blocks)

    def after(turn: int, at_s: float, rows: list[Row]) -> float | None:
        if turn != 2:
            return None
        row, end_s = helper(session, at_s + 0.1, 1, prefix, 4, "Explore", header)
        rows.append(row)
        return end_s + 0.2

    return Stream(8, session.tokens(400, 700), after_turn=after).rows(session, 0.0, Prompt(session, prefix))[0]


def fan_out(session: Session, header: Header) -> list[Row]:
    """Three helpers at once that the root waits for; later one that outlives the session."""
    prefix = session.new_blocks(header.num_blocks)

    def after(turn: int, at_s: float, rows: list[Row]) -> float | None:
        if turn == 4:
            rows.append(helper(session, at_s + 0.1, 9, prefix, 9, "Watcher", header)[0])
        if turn != 1:
            return None
        made = [helper(session, at_s + 0.05 * (i + 1), i + 1, prefix, 3 + i, "Worker", header) for i in range(3)]
        rows.extend(row for row, _ in made)
        return max(end_s for _, end_s in made) + 0.2

    return Stream(7, session.tokens(400, 700), after_turn=after).rows(session, 0.0, Prompt(session, prefix))[0]


def compaction(session: Session, header: Header) -> list[Row]:
    """The prompt is cut back to its prefix after six requests and goes on."""
    prefix = session.new_blocks(header.num_blocks)
    prompt = Prompt(session, prefix)
    before, at_s = Stream(6, session.tokens(900, 1400)).rows(session, 0.0, prompt)
    prompt.compact(len(prefix) + 2, session.tokens(250, 400))
    at_s += session.pause_s(1, 2)
    return before + Stream(5, session.tokens(80, 160)).rows(session, at_s, prompt)[0]


def side_model(session: Session, header: Header) -> list[Row]:
    """A title call first, one call on a second model later, and no declared prefix."""
    title = Prompt(session, [])
    title.grow(session.tokens(150, 250))
    first, at_s = Call(title.num_tokens, 16, None, SIDE, False, "end_turn", "text").row(0.0, title)
    prompt = Prompt(session, session.new_blocks(header.num_blocks))

    def after(turn: int, at_s: float, rows: list[Row]) -> float | None:
        if turn != 3:
            return None
        page = Prompt(session, [])
        page.grow(session.tokens(700, 1100))
        row, end_s = Call(page.num_tokens, session.tokens(40, 80), 0.1, SIDE, False, "end_turn", "text").row(at_s + 0.1, page)
        rows.append(row)
        return end_s

    stream = Stream(7, session.tokens(400, 700), after_turn=after)
    return [first, *stream.rows(session, at_s + 0.3, prompt)[0]]


SHAPES: dict[str, Callable[[Session, Header], list[Row]]] = {
    "linear": linear,
    "one_helper": one_helper,
    "fan_out": fan_out,
    "compaction": compaction,
    "side_model": side_model,
}


def make_trace(shape: str, name: str, *, seed: int = 7, scale: float = 1.0, time_scale: float = 1.0) -> dict[str, Any]:
    """One trace document. `scale` multiplies every token count, `time_scale` every time."""
    header = Header(int(TOOL_TOKENS * scale) // BLOCK * BLOCK, int(SYSTEM_TOKENS * scale) // BLOCK * BLOCK)
    rows = SHAPES[shape](Session(name, f"{seed}:{name}", scale, time_scale), header)
    # One shape declares nothing although its prompt starts with the same blocks: then everything is one user message.
    declared = Header(0, 0) if shape == "side_model" else header
    models = {model for row in rows for model in (row["models"] if row["type"] == "subagent" else [row["model"]])}
    return {
        "id": name,
        "models": sorted(models),
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "tool_tokens": declared.tools,
        "system_tokens": declared.system,
        "requests": rows,
    }


def write_trace(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / f"{document['id']}.json"
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    return path
