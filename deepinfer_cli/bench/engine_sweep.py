"""Prefill and decode of the engine alone, in this process: no server, no HTTP, no cache. One measurement is one point of a sweep."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from deepinfer_cli.units import show_number
from engine.request import Request, SamplingParams
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_cli.report.tables import Grid
    from engine.engine import Engine

SCHEMA = "dix.bench/1"
WARM_UP_STEPS = 2  # the first decode steps allocate


@dataclass(frozen=True, slots=True)
class Point:
    """One measured point. time_us: of a prompt from the first chunk to the first token, or of one decode step.

    tok_s: of all sequences together. user_tok_s: of one of them, decode only.
    """

    id: str
    params: dict[str, int]
    time_us: list[float]
    tok_s: float
    user_tok_s: float | None = None
    tokens_per_step: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def median_us(self) -> float:
        return statistics.median(self.time_us)

    def plain(self) -> dict[str, Any]:
        ordered = sorted(self.time_us)
        tenth = len(ordered) // 10
        times = {"median": self.median_us, "p10": ordered[tenth], "p90": ordered[-1 - tenth], "n": len(ordered)}
        extra = {"user_tok_s": self.user_tok_s, "tokens_per_step": self.tokens_per_step}
        return {"schema": SCHEMA, "id": self.id, "params": self.params, "time_us": times, "tok_s": self.tok_s, **extra, "notes": self.notes}


class Bench:
    """Drives one engine. Prompts are random ids from a seed, so no two share a prefix."""

    def __init__(self, engine: Engine, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._rng, self._clock = engine, random.Random(seed), clock
        self._sent = 0

    def prefill(self, prompt_len: int, repeats: int) -> Point:
        """One prompt at a time, one token out. Raises: ConfigError for a prompt that the engine cannot take."""
        self._check(prompt_len + 1, 1)
        times = []
        for _ in range(repeats):
            self._add(prompt_len, 1)
            began = self._clock()
            self._drain()
            times.append((self._clock() - began) * 1e6)
        chunk = int(self._engine.limits.max_num_batched_tokens)
        return Point("engine.prefill", {"prompt": prompt_len, "chunk": chunk}, times, prompt_len / statistics.median(times) * 1e6)

    def decode(self, batch: int, context: int, steps: int) -> Point:
        """So many sequences of so long a context, step by step. Raises: ConfigError when they do not fit."""
        # Early sequences decode while later ones are prefilled, and with speculation a step may end more than one token.
        # Room for both keeps the batch whole to the end.
        pauses = math.ceil(batch * context / self._engine.limits.max_num_batched_tokens) + 2
        room = (steps + WARM_UP_STEPS + pauses) * (1 + int(getattr(self._engine.limits, "draft_block_size", 0)))
        self._check(context + room, batch)
        for _ in range(batch):
            self._add(context, room)
        scheduler = self._engine.scheduler
        while scheduler.waiting:
            self._engine.step()
        if len(scheduler.running) < batch:
            self._abort()
            raise ConfigError(f"{batch} sequences of {context} tokens do not fit", hint="smaller --decode or --context, or more cache")
        for _ in range(WARM_UP_STEPS):
            self._engine.step()
        times, tokens = [], 0
        for _ in range(steps):
            began = self._clock()
            outputs = self._engine.step()
            times.append((self._clock() - began) * 1e6)
            tokens += sum(len(output.token_ids) for output in outputs)
        assert len(scheduler.running) == batch, f"{batch - len(scheduler.running)} of {batch} sequences ended while the clock ran"
        self._abort()
        seconds, each = sum(times) / 1e6, tokens / batch
        params = {"batch": batch, "context": context, "steps": steps}
        return Point("engine.decode", params, times, tokens / seconds, each / seconds, each / steps)

    def _check(self, length: int, batch: int) -> None:
        limits = self._engine.limits
        if length > limits.max_model_len:
            raise ConfigError(
                f"{length:,} tokens exceed the model's {limits.max_model_len:,}", hint="shorter --prefill, --context or --steps"
            )
        if batch > limits.max_num_seqs:
            raise ConfigError(
                f"{batch} sequences exceed engine.max_num_seqs {limits.max_num_seqs}", hint=f"--set engine.max_num_seqs={batch}"
            )

    def _add(self, prompt_len: int, max_tokens: int) -> None:
        vocab = int(getattr(self._engine.limits, "tokenizer_size", self._engine.limits.vocab_size))
        ids = [self._rng.randrange(2, min(vocab, self._engine.limits.vocab_size)) for _ in range(prompt_len)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(Request(f"bench-{self._sent}", ids, params, cache_read=False, cache_write=False))
        self._sent += 1

    def _drain(self) -> None:
        self._engine.step()
        while not self._engine.idle:
            self._engine.step()

    def _abort(self) -> None:
        scheduler = self._engine.scheduler
        for seq in [*scheduler.waiting, *scheduler.running]:
            self._engine.abort(seq.request.request_id)
        self._drain()


def run_sweep(
    bench: Bench, prompts: Iterable[int], batches: Iterable[int], contexts: Iterable[int], steps: int, repeats: int
) -> list[Point]:
    """Every prefill length, then every batch at every context."""
    points = [bench.prefill(prompt, repeats) for prompt in prompts]
    return points + [bench.decode(batch, context, steps) for context in contexts for batch in batches]


def pareto(points: list[Point]) -> list[Point]:
    """Decode points that no other beats in both tokens a second and tokens a second of one user, slowest user first."""
    decode = [p for p in points if p.user_tok_s is not None]
    best: list[Point] = []
    for point in sorted(decode, key=lambda p: (-(p.user_tok_s or 0.0), -p.tok_s)):
        if not best or point.tok_s > best[-1].tok_s:
            best.append(point)
    return best[::-1]


def prefill_grid(points: list[Point]) -> Grid:
    from deepinfer_cli.report.tables import Grid

    rows: list[list[str | None]] = [
        [
            f"{p.params['prompt']:,}",
            str(len(p.time_us)),
            show_number(p.median_us / 1e3),
            show_number(max(p.time_us) / 1e3),
            show_number(p.tok_s),
        ]
        for p in points
        if p.id == "engine.prefill"
    ]
    return Grid("Prefill", ["Prompt tok", "n", "median ms", "max ms", "tok/s"], rows, left=frozenset())


def decode_grid(points: list[Point]) -> Grid:
    from deepinfer_cli.report.tables import Grid

    best = pareto(points)
    rows: list[list[str | None]] = [
        [
            f"{p.params['context']:,}",
            f"{p.params['batch']:,}",
            show_number(p.median_us / 1e3, 2),
            show_number(sorted(p.time_us)[-1 - len(p.time_us) // 10] / 1e3, 2),
            show_number(p.tokens_per_step, 2),
            show_number(p.tok_s),
            show_number(p.user_tok_s),
            "frontier" if p in best else "",
        ]
        for p in points
        if p.id == "engine.decode"
    ]
    heads = ["Context", "Batch", "step median ms", "p90", "tok a step", "tok/s", "per user", ""]
    return Grid("Decode", heads, rows, left=frozenset({7}))


def page(points: list[Point], title: str, stamp: str | None) -> str:
    """Tables, prefill curve and the frontier of decoding, self-contained."""
    from deepinfer_cli.report.html import banner, document, figures_html, table
    from deepinfer_cli.report.plots import Figure
    from deepinfer_cli.report.svg import Series, line_chart

    grids = [grid for grid in (prefill_grid(points), decode_grid(points)) if grid.rows]
    made = []
    prefill = [p for p in points if p.id == "engine.prefill"]
    if prefill:
        line = Series("tok/s", [float(p.params["prompt"]) for p in prefill], [p.tok_s for p in prefill], color=0)
        svg = line_chart("Prefill", [line], "prompt tokens (logarithmic)", "tok/s", log=True, ticks=list(line.x))
        made.append(Figure("Prefill", "Prompt tokens computed a second, by length of the prompt.", svg, grids[0], []))
    contexts = sorted({p.params["context"] for p in points if p.id == "engine.decode"})
    curves = []
    for color, context in enumerate(contexts):
        here = sorted((p for p in points if p.params.get("context") == context), key=lambda p: p.user_tok_s or 0.0)
        texts = [f"context {context:,}, batch {p.params['batch']}: {p.tok_s:,.1f} tok/s, {p.user_tok_s:,.1f} for one user" for p in here]
        curves.append(Series(f"context {context:,}", [p.user_tok_s or 0.0 for p in here], [p.tok_s for p in here], texts, color))
    if curves:
        svg = line_chart("Decode", curves, "tok/s of one user", "tok/s of all")
        legend = [(c.color, c.name) for c in curves]
        made.append(
            Figure(
                "Decode: throughput against interactivity", "Up and right is better; along a line the batch grows.", svg, grids[-1], legend
            )
        )
    tables = "".join(f"<section><h3>{escape(grid.title)}</h3>{table(grid)}</section>" for grid in grids)
    parts = [banner(stamp)] if stamp else []
    return document(title, [*parts, figures_html(made), f"<article><h2>Numbers</h2>{tables}</article>"])
