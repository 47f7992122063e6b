"""Engines side by side on the embedded model's own conversations: interleaved rounds, ratios with intervals. For the benches here."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.eval_prompts import load_prompts
from engine.models.tiny import ensure_tiny
from engine.request import Request, SamplingParams
from engine.tokenizer import IncrementalDetokenizer, Tokenizer
from hicache.config import HiCacheConfig

# Sets with short prompts and longer answers: what is measured is decoding. Drafts fare as they do on all sets, 4 of 5 kept.
SETS = ("json", "addition_thinking", "chat", "copy")
# Two-sided 95 % points of Student's t by degrees of freedom; from 30 on the normal one.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09)


def model_dir(given: str | None) -> str:
    return given or str(ensure_tiny(Path.home() / ".cache" / "dix" / "models"))


def make_engine(model: str, streams: int, **changes: Any) -> Engine:
    """An engine whose compiled step is ready, when it has one."""
    settings: dict[str, Any] = {
        "max_num_seqs": max(streams, 8),
        "kv_cache_gb": 0.5,
        "max_model_len": 1536,
        "num_threads": 1,
        "prefill_any_interval": 2,
        **changes,
    }
    engine = Engine(EngineConfig(model=model, **settings), HiCacheConfig(size_gb=0))
    native = getattr(engine.runner, "native", None)
    assert native is None or native.wait() or settings.get("enforce_eager") or engine.limits.device != "cpu", native.status
    return engine


def prompts_of(model: str) -> list[list[int]]:
    """Rendered held-out prompts, their sets mixed."""
    tokenizer = Tokenizer.from_dir(model)
    wanted = [prompt for prompt in load_prompts()[0] if prompt.set in SETS]
    random.Random(1).shuffle(wanted)
    return [tokenizer.encode(prompt.render()) for prompt in wanted]


@dataclass
class Round:
    """What one engine did: tokens and seconds of its decode steps, and sequences in all of those steps."""

    tokens: int = 0
    seconds: float = 0.0
    rows: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Host:
    """What a server's rank does with outputs between two steps: text, one token at a time, and a message."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, IncrementalDetokenizer] = {}

    def __call__(self, outputs: list[Any]) -> None:
        for output in outputs:
            text = self._texts.get(output.request_id)
            if text is None:
                text = self._texts[output.request_id] = IncrementalDetokenizer(self._tokenizer)
            text.push(output.token_ids)
        json.dumps([(output.request_id, output.token_ids) for output in outputs])


def serve(engine: Engine, requests: list[Request], streams: int, host: Callable[[list[Any]], None], clock: Callable[[], float]) -> Round:
    """Serve all requests, `streams` at a time: one that ends makes place for the next.

    Only decode steps count, and only while three quarters of the streams decode: what is measured is decoding under a steady load.
    """
    waiting, active, result = list(requests), 0, Round()
    while waiting or active:
        while waiting and active < streams:
            engine.add_request(waiting.pop(0))
            active += 1
        prompt_steps, running = engine.scheduler.counters.prompt_steps, len(engine.scheduler.running)
        began = clock()
        outputs = engine.step()
        host(outputs)
        seconds = clock() - began
        active -= sum(output.finish_reason is not None for output in outputs)
        if running >= max(1, streams * 3 // 4) and engine.scheduler.counters.prompt_steps == prompt_steps:
            result.seconds += seconds
            result.tokens += sum(len(output.token_ids) for output in outputs)
            result.rows += running
    while not engine.idle:
        engine.step()
    return result


@dataclass
class Comparison:
    """Speeds by contender, round by round."""

    speeds: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)

    def ratio(self, over: str, under: str) -> tuple[float, float, float]:
        """Geometric mean of paired ratios and its 95 % interval."""
        logs = [math.log(a / b) for a, b in zip(self.speeds[over], self.speeds[under], strict=True)]
        middle = statistics.mean(logs)
        t = T95[min(len(logs) - 2, len(T95) - 1)] if len(logs) < 30 else 1.96
        half = t * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
        return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def compare(
    engines: dict[str, Engine],
    model: str,
    streams: int,
    rounds: int,
    requests: int,
    clock: Callable[[], float] = time.perf_counter,
    **params: Any,
) -> Comparison:
    """Rounds of all engines with the same prompts, in random order; the first round is not counted. Answers end where they end."""
    prompts, tokenizer, rng = prompts_of(model), Tokenizer.from_dir(model), random.Random(streams)
    result = Comparison({name: [] for name in engines})
    for number in range(rounds + 1):
        some = [rng.choice(prompts) for _ in range(max(requests, 3 * streams))]
        for name in rng.sample(sorted(engines), len(engines)):
            sampling = SamplingParams(**{"max_tokens": 200, "temperature": 0.0, **params})
            asked = [Request(f"{name}-{streams}-{number}-{i}", ids, sampling, cache_read=False) for i, ids in enumerate(some)]
            one = serve(engines[name], asked, streams, Host(tokenizer), clock)
            if number:
                result.speeds[name].append(one.speed)
                result.steps[name] = result.steps.get(name, 0.0) + one.tokens / one.rows / rounds
    return result


def show(what: str, comparison: Comparison, base: str) -> None:
    medians = {name: statistics.median(speeds) for name, speeds in comparison.speeds.items()}
    print(f"{what}: " + ", ".join(f"{name} {speed:,.0f} tok/s ({comparison.steps[name]:.2f} a step)" for name, speed in medians.items()))
    for name in comparison.speeds:
        if name != base:
            middle, low, high = comparison.ratio(name, base)
            print(f"    {name} / {base}: {middle:.3f} [{low:.3f}, {high:.3f}]", flush=True)


def start(threads: int = 1) -> None:
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
