"""Measure a running server at several prefill intervals, through `/deepinfer/scheduling`, and its step times for the simulator."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from deepinfer_cli.api import Api, RequestRefused
from deepinfer_cli.bench.cells import with_values
from deepinfer_cli.bench.compiled import await_compiled
from deepinfer_cli.bench.harness import Run
from deepinfer_cli.bench.load import arrival_times
from deepinfer_cli.bench.preflight import preflight
from deepinfer_cli.bench.recipe import Recipe
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.report.stats import Summary, summarize
from deepinfer_cli.tune.simulator import Simulated, StepCosts, Workload, mean_wait_steps
from engine.prefill_gate import DECODE_PAUSE, VoteRule
from hicache.errors import DixError

PATH = "/deepinfer/scheduling"
KEY = "prefill_any_interval"
VOTES = 500  # decode steps that the calibration lets an idle group wait: long enough that the clock's noise is small beside it
CALIBRATION_REQUESTS = 5
SETTLE_S = 0.2  # an idle group votes every 20 ms; the new interval travels with a vote


class NotMeasurable(DixError):
    """The server or the load does not give what is needed."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One run at one interval, or one simulation of it. Times in ms, None where it was not measured."""

    wait_steps: float | None = None
    queue_ms: float | None = None
    lone_ttft_ms: float | None = None
    ttft_ms: float | None = None
    ttft_p90_ms: float | None = None
    itl_p99_ms: float | None = None
    tpot_ms: float | None = None
    output_tok_s: float | None = None


@dataclass(slots=True)
class Measurement:
    """Every run at one interval, and what the simulator says of it."""

    value: int
    runs: list[Sample] = field(default_factory=list)
    simulated: Sample = field(default_factory=Sample)
    run_ids: list[str] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        return [value for run in self.runs if (value := getattr(run, name)) is not None]

    def mean(self, name: str) -> float | None:
        return float(np.mean(found)) if (found := self.values(name)) else None


class Bench:
    """Runs recipes against one server at chosen intervals. `restore` puts the server's own interval back."""

    def __init__(self, call: Invocation, api: Api, key: str, say: Callable[[str], None]) -> None:
        self._call, self._api, self._key, self._say = call, api, key, say
        try:
            self._before: Mapping[str, Any] = api.get(PATH)
        except RequestRefused as error:
            raise NotMeasurable(f"{api.url} has no {PATH}", hint="intervals can be changed on a dix server only") from error
        if "prefill_vote" not in self._before:
            raise NotMeasurable("the server does not say what decides about prompt steps", hint="it is older than this command: restart it")
        if self.rule is VoteRule.URGENT:
            raise NotMeasurable("with engine.prefill_vote=urgent no interval decides", hint="start the server with prefill_vote=intervals")
        metrics = api.get("/deepinfer/metrics")
        self.ranks, self.model = len(metrics.get("ranks") or []), str(metrics.get("model", ""))

    @property
    def attempt(self) -> int:
        return int(self._before["prefill_attempt_interval"])

    @property
    def interval(self) -> int:
        return int(self._before[KEY])

    @property
    def rule(self) -> VoteRule:
        return VoteRule(self._before["prefill_vote"])

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of a prompt step."""
        return int(self._before["max_num_batched_tokens"])

    def set(self, value: int) -> None:
        self._api.post(PATH, {KEY: value})
        time.sleep(SETTLE_S)

    def restore(self) -> None:
        self.set(self.interval)

    def run(self, recipe: Recipe, value: int, what: str, place: str = "") -> Summary:
        """One run at an interval. place: which of how many, for whoever waits. Raises: NotMeasurable when it is not valid."""
        self.set(value)
        await_compiled(self._api, self._call.ui)
        server = preflight(self._api, recipe)
        # Intervals count the decode steps since the last prompt step: the preflight's answer leaves some, an answer of one token none.
        self._api.chat({"model": server.model, "messages": [{"role": "user", "content": "Go."}], "max_tokens": 1, "temperature": 0})
        run = Run(self._call, recipe, server, self._api, self._key, {"tune": what, KEY: str(value)})
        self._say(f"{what} · interval {value} · {recipe.requests} requests{place}")
        verdict, code = run.execute()
        if code == 130:
            raise KeyboardInterrupt
        if not verdict.valid:
            raise NotMeasurable(
                f"{what} at interval {value} is not valid: {'; '.join(verdict.reasons)}", hint=f"dix report {run.folder.name}"
            )
        return summarize(run.folder)


def lone_recipe(load: Recipe, count: int, prompt_tokens: int) -> Recipe:
    """One prompt at a time, one token out, past the cache: everything before the first token and nothing else."""
    changes: dict[str, Any] = {
        "load.arrival": "closed", "load.concurrency": 1, "load.conversations": count, "load.turns": 1, "load.think_time_s": 0.1,
        "load.times_s": (), "prompt.system_tokens": 0, "prompt.first_tokens": prompt_tokens,
        "output.tokens": 1, "cache.bypass": True, "cache.state": "asis",
    }  # fmt: skip
    return with_values(load, changes)


def check_load(load: Recipe) -> None:
    """Raises: NotMeasurable for a load that the simulator cannot follow."""
    if load.load.turns != 1 or not load.cache.bypass:
        hint = "one turn a conversation and cache.bypass = true, as in recipes/prefill-interval.toml"
        raise NotMeasurable(f"recipe {load.name} does not fit: its prompts depend on each other or on the cache", hint=hint)


def calibrate(bench: Bench, load: Recipe, lone_tokens: int) -> StepCosts:
    """Step times of the running server: votes, prompt steps of two sizes, decode steps of two widths.

    Raises:
        NotMeasurable: prompts of several chunks that each wait.
    """
    most = max(load.prompt.first_tokens, 2 * lone_tokens)
    if bench.rule is VoteRule.REFERENCE and most > bench.chunk_tokens:
        raise NotMeasurable(
            f"with engine.prefill_vote=reference every chunk waits, which the calibration cannot tell from work: {most} tokens a prompt",
            hint=f"prompts of at most {bench.chunk_tokens} tokens, or prefill_vote=intervals",
        )
    lone = lone_recipe(load, CALIBRATION_REQUESTS, lone_tokens)
    waiting = bench.run(lone, VOTES if bench.ranks > 1 else 1, "calibration: votes")
    small = columns(waiting)
    large_recipe = with_values(lone, {"prompt.first_tokens": most})
    prompt = bench.run(large_recipe, 1, "calibration: prompts")
    large = columns(prompt)
    vote_s, wake_s = votes_of([(wait_of(s), float(f["server_queue_ms"].median()) / 1e3) for s, f in ((prompt, large), (waiting, small))])
    prefills = [(int(f["prompt_tokens"].median()), float(f["prefill_ms"].median()) / 1e3) for f in (small, large)]
    prompt_s, token_s = prompt_costs(prefills, vote_s, bench.chunk_tokens)
    gaps = [_gaps(bench, load, rows) for rows in (1, 4)]
    row_s = max(0.0, (gaps[1][0] - gaps[0][0]) / 3)
    return StepCosts(
        vote_s=vote_s,
        wake_s=wake_s,
        decode_s=max(0.0, gaps[0][0] - row_s - vote_s),
        decode_row_s=row_s,
        prompt_s=prompt_s,
        prompt_token_s=token_s,
        overhead_s=outside_engine_s(small),
        tokens_per_step=gaps[0][1],
    )


def votes_of(waits: list[tuple[float, float]]) -> tuple[float, float]:
    """(seconds a step, seconds to wake up) from a short and a long wait, each as (steps, seconds in the queue).

    Of the two votes of a prompt step the first is the queue's, the second the prefill's: a prompt is admitted in between.
    """
    (few, short_s), (many, long_s) = waits
    if many <= few:  # a single rank never waits
        return 0.0, max(0.0, short_s)
    vote_s = max(0.0, (long_s - short_s) / (many - few))
    return vote_s, max(0.0, short_s - (few + 1) * vote_s)


def num_chunks(tokens: int, chunk_tokens: int) -> int:
    return -(-tokens // chunk_tokens)


def voting_s(chunks: int, vote_s: float) -> float:
    """Of a prefill: two votes a chunk, less the first one, which admitted the prompt."""
    return (2 * chunks - 1) * vote_s


def prompt_costs(prefills: list[tuple[int, float]], vote_s: float, chunk_tokens: int) -> tuple[float, float]:
    """(seconds a prompt step, seconds a token) from two prefills while nobody decodes, each as (tokens, seconds).

    Prompts of equally full steps do not tell the two apart: then all of it counts by tokens.
    """
    (n1, s1), (n2, s2) = prefills
    k1, k2 = num_chunks(n1, chunk_tokens), num_chunks(n2, chunk_tokens)
    work1, work2 = max(0.0, s1 - voting_s(k1, vote_s)), max(0.0, s2 - voting_s(k2, vote_s))
    apart = k1 * n2 - k2 * n1
    token_s = max(0.0, (k1 * work2 - k2 * work1) / apart) if apart else work2 / n2
    return max(0.0, work1 - token_s * n1) / k1, token_s


def outside_engine_s(good: pd.DataFrame) -> float:
    """Median of what the client's TTFT has beyond the engine's account: HTTP, tokenising, sending."""
    inside = good["server_queue_ms"] + good["restore_ms"] + good["prefill_ms"]
    return float((good["ttft_ms"] - inside).median()) / 1e3


def refined(costs: StepCosts, lone: pd.DataFrame, chunk_tokens: int) -> StepCosts:
    """Prompt steps and overhead from the lone requests of all values together.

    They are the same work at every interval, so a machine that got slower since the calibration moves them all alike.
    """
    tokens = int(lone["prompt_tokens"].median())
    chunks = num_chunks(tokens, chunk_tokens)
    work_s = max(0.0, float(lone["prefill_ms"].median()) / 1e3 - voting_s(chunks, costs.vote_s))
    prompt_s = max(0.0, work_s - costs.prompt_token_s * tokens) / chunks
    token_s = min(costs.prompt_token_s, work_s / tokens)
    return dataclasses.replace(costs, prompt_s=prompt_s, prompt_token_s=token_s, overhead_s=outside_engine_s(lone))


def under_load(costs: StepCosts, load: pd.DataFrame, gaps_ms: pd.Series[float], chunk_tokens: int) -> StepCosts:
    """The step times that prevailed while the load ran: clients, ranks and whatever else shares the machine slow each other down.

    The medians of prompt steps and gaps scale the calibrated times; how they depend on tokens and sequences stays as calibrated.
    """
    tokens = int(load["prompt_tokens"].median())
    chunks = num_chunks(tokens, chunk_tokens)
    decode = costs.decode(1) + costs.vote_s
    work = costs.prompt_s * chunks + costs.prompt_token_s * tokens
    beside = voting_s(chunks, costs.vote_s) + (chunks - 1) * DECODE_PAUSE * decode
    slower = max(0.0, float(load["prefill_ms"].median()) / 1e3 - beside) / work if work else 1.0
    slower_decode = float(gaps_ms.median()) / 1e3 / decode if decode and len(gaps_ms) else 1.0
    return dataclasses.replace(
        costs,
        vote_s=costs.vote_s * slower_decode,
        decode_s=costs.decode_s * slower_decode,
        decode_row_s=costs.decode_row_s * slower_decode,
        prompt_s=costs.prompt_s * slower,
        prompt_token_s=costs.prompt_token_s * slower,
        overhead_s=outside_engine_s(load),
    )


def _gaps(bench: Bench, load: Recipe, rows: int) -> tuple[float, float]:
    """(median gap in seconds, tokens a step) with so many sequences on every rank."""
    together = rows * bench.ranks
    changes: dict[str, Any] = {"load.concurrency": together, "load.conversations": together, "output.tokens": max(16, load.output.tokens)}
    recipe = with_values(lone_recipe(load, together, load.prompt.first_tokens), changes)
    summary = bench.run(recipe, 1, f"calibration: {rows} decoding a rank")
    good = summary.good
    steps = float((good["chunks"] - 1).sum())
    return float(summary.gaps["gap_ms"].median()) / 1e3, float((good["output_tokens"] - 1).sum()) / steps if steps else 1.0


def columns(summary: Summary) -> pd.DataFrame:
    """Good requests with the server's own account. Raises: NotMeasurable for a server that gives none."""
    good = summary.good
    if good["server_queue_ms"].isna().all():
        raise NotMeasurable(
            "the server says nothing of where the time to first token goes", hint="it is older than this command: restart it"
        )
    return good.astype({"prompt_tokens": "float64", "output_tokens": "float64"})


def wait_of(lone: Summary) -> float:
    """Steps that a lone request waited: what the group's step counter grew by, less one prompt step a request."""
    before, after = (lone.run.get(name) or {} for name in ("counters_before", "counters_after"))
    growth, prompts = (_growth(before, after, name) for name in ("steps_total", "prompt_steps_total"))
    return (growth - prompts) / max(1, len(lone.requests))


def _growth(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> int:
    """Of the rank that saw most of it: all ranks step together."""
    old = {rank["rank"]: rank.get(name, 0) for rank in before.get("ranks") or []}
    return max((int(rank.get(name, 0)) - int(old.get(rank["rank"], 0)) for rank in after.get("ranks") or []), default=0)


def lone_sample(summary: Summary) -> Sample:
    good = columns(summary)
    return Sample(
        wait_steps=wait_of(summary), queue_ms=float(good["server_queue_ms"].median()), lone_ttft_ms=float(good["ttft_ms"].median())
    )


def load_sample(summary: Summary, lone: Sample) -> Sample:
    good = columns(summary)
    gaps = summary.gaps["gap_ms"].to_numpy(dtype=np.float64)
    return Sample(
        lone.wait_steps,
        lone.queue_ms,
        lone.lone_ttft_ms,
        ttft_ms=float(good["ttft_ms"].mean()),
        ttft_p90_ms=float(np.percentile(good["ttft_ms"], 90)),
        itl_p99_ms=float(np.percentile(gaps, 99)) if len(gaps) else None,
        tpot_ms=float(good["tpot_ms"].mean()),
        output_tok_s=summary.value("output_rate"),
    )


def workload(recipe: Recipe, prompt_tokens: int) -> Workload:
    """A recipe as the simulator takes it; prompts are as long as the server counted them."""
    load, count = recipe.load, recipe.load.conversations
    arrivals = () if load.arrival == "closed" else tuple(arrival_times(load, count, recipe.prompt.seed))
    return Workload(prompt_tokens, recipe.output.tokens, count, arrivals, load.concurrency, load.think_time_s)


def simulated_sample(lone: list[Simulated], load: list[Simulated], costs: StepCosts, load_costs: StepCosts) -> Sample:
    """The same numbers of simulated requests; `load` may be empty."""
    waits, queued = mean_wait_steps(lone), float(np.mean([r.waited_steps for r in lone]))
    lone_ms = (float(np.median([r.ttft_s for r in lone])) + costs.overhead_s) * 1e3
    queue_ms = ((queued + 1) * costs.vote_s + costs.wake_s) * 1e3  # a lone request waits while nobody computes, then for the vote
    if not load:
        return Sample(waits, queue_ms, lone_ms)
    ttft = np.asarray([r.ttft_s + load_costs.overhead_s for r in load]) * 1e3
    gaps = np.asarray([gap for r in load for gap in r.gaps_s]) * 1e3
    tokens = [1 + len(r.gaps_s) * load_costs.tokens_per_step for r in load]
    tpot = [(r.last_s - r.first_s) / (n - 1) * 1e3 for r, n in zip(load, tokens, strict=True) if n > 1]
    span_s = max(r.last_s for r in load) - min(r.at_s for r in load)
    return Sample(
        waits,
        queue_ms,
        lone_ms,
        float(ttft.mean()),
        float(np.percentile(ttft, 90)),
        float(np.percentile(gaps, 99)) if len(gaps) else None,
        float(np.mean(tpot)) if tpot else None,
        sum(tokens) / span_s if span_s > 0 else None,
    )
