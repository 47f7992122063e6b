"""Measure a live server's prefix cache: recorded sessions, a herd, times with and without a hit, a soak.

python -m tests.e2e.cache_live traces|herd|ttft|soak --url http://127.0.0.1:8888 [--seconds 300]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from deepinfer_cli.api import Api
from engine.tokenizer import Tokenizer
from hicache.policy import restore_cap
from hicache.simulate import SimulatedCache, SimulationResult, TracePrompt, simulate, trace_prompts

TRACES = sorted((Path(__file__).parents[1] / "golden" / "agentx" / "traces").glob("*.json"))
PAGE, KEEP = 128, 140
BASE = {"temperature": 0, "max_tokens": 1, "thinking": {"type": "disabled"}}


@dataclass
class Live:
    """A server of the embedded model. words: one token each wherever they stand."""

    url: str
    frames_per_state: int = 3

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=600, trust_env=False)
        self.api = Api(self.url)
        model = self.http.get("/v1/models").json()["data"][0]
        self.context = int(model["max_model_len"])
        self.tokenizer = Tokenizer.from_dir(_model_dir())
        texts = (self.tokenizer.decode([i]) for i in range(self.tokenizer.vocab_size))
        self.words = [text for text in texts if re.fullmatch(r" [a-z]{3,}", text)]
        self.user_id = self.tokenizer.added["<｜User｜>"]

    def text(self, tokens: list[int]) -> str:
        """Text of exactly that many tokens, equal where they are equal."""
        return "".join(self.words[token % len(self.words)] for token in tokens)

    def ask(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/chat/completions", json={**BASE, "messages": messages, **fields})
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body

    def ids(self, messages: list[dict[str, str]]) -> list[int]:
        return [int(i) for i in self.http.post("/tokenize", json={**BASE, "messages": messages}).json()["tokens"]]

    def reset(self) -> None:
        self.http.post("/reset_prefix_cache", json={}).raise_for_status()

    def ranks(self) -> list[dict[str, Any]]:
        ranks: list[dict[str, Any]] = self.http.get("/deepinfer/metrics").json()["ranks"]
        return ranks

    def rss_bytes(self) -> int:
        return sum(psutil.Process(rank["pid"]).memory_info().rss for rank in self.ranks())


def _model_dir() -> Path:
    from engine.models.tiny import ensure_tiny

    return ensure_tiny(Path.home() / ".cache" / "dix" / "models")


# ---- recorded sessions


def bodies(live: Live, path: Path) -> Iterator[list[dict[str, str]]]:
    """A recorded session as chats: system and tools part as system text, the rest as one user turn."""
    for prompt in trace_prompts(json.loads(path.read_text())):
        head, rest = list(prompt.tokens[: prompt.anchor_tokens]), list(prompt.tokens[prompt.anchor_tokens :])
        yield [{"role": "system", "content": live.text(head)}, {"role": "user", "content": live.text(rest)}]


def replay(live: Live, messages: list[list[dict[str, str]]], session: str) -> tuple[int, SimulationResult]:
    """Hit tokens of the server, and what the simulator says about the very same prompts."""
    live.reset()
    hits, prompts = 0, []
    for body in messages:
        ids = live.ids(body)
        prompts.append(TracePrompt(ids, ids.index(live.user_id)))
        hits += live.ask(body, session_id=session)["usage"]["prompt_cache_hit_tokens"]
    return hits, simulate(prompts, SimulatedCache(num_frames=100_000, frames_per_state=live.frames_per_state))


def generated(seed: int, live: Live) -> list[list[dict[str, str]]]:
    """Interleaved conversations of an agent and its helpers: one system text, growth of 20 to 900 tokens, a few returns to an old turn."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        return live.text([rng.randrange(10**6) for _ in range(count)])

    system = {"role": "system", "content": words(1200)}
    talks: list[list[dict[str, str]]] = [[system, {"role": "user", "content": words(200)}] for _ in range(3)]
    found = []
    for _ in range(30):
        talk = rng.choice(talks)
        found.append([dict(message) for message in talk])
        talk += [
            {"role": "assistant", "content": words(rng.randrange(10, 120))},
            {"role": "user", "content": words(rng.randrange(20, 800))},
        ]
        if sum(len(m["content"]) for m in talk) > 40_000:
            del talk[4:]
    return found


def traces(live: Live) -> dict[str, Any]:
    rows = {}
    sets = [(path.stem, list(bodies(live, path))) for path in TRACES] + [(f"generated-{seed}", generated(seed, live)) for seed in range(2)]
    for name, messages in sets:
        hits, result = replay(live, messages, name)
        ideal = result.oracle_tokens
        rows[name] = {
            "requests": result.requests,
            "prompt_tokens": result.prompt_tokens,
            "oracle": ideal,
            "simulator": result.hit_tokens,
            "live": hits,
            "simulator_share": result.hit_tokens / ideal,
            "live_share": hits / ideal,
        }
    return rows


# ---- a herd


def herd(live: Live, requests: int = 64, prefix_tokens: int = 16_000) -> dict[str, Any]:
    """Equal prefixes at once. possible: what all but the first prompt share with it. full: prompts that hit nothing."""
    live.reset()
    system = {"role": "system", "content": live.text(list(range(prefix_tokens)))}
    prompts = [[system, {"role": "user", "content": live.text([7 * i + j for j in range(40)])}] for i in range(requests)]
    began = time.perf_counter()
    with ThreadPoolExecutor(requests) as pool:
        usages = [answer["usage"] for answer in pool.map(live.ask, prompts)]
    seconds = time.perf_counter() - began
    length = usages[0]["prompt_tokens"]
    cached = [usage["prompt_cache_hit_tokens"] for usage in usages]
    shared = min(prefix_tokens // PAGE * PAGE, restore_cap(length, KEEP, PAGE))
    return {
        "requests": requests,
        "prompt_tokens": length,
        "seconds": seconds,
        "full": sum(c < shared // 2 for c in cached),
        "share_of_possible": sum(cached) / (shared * (requests - 1)),
        "cached": sorted(set(cached)),
        "held": [rank["prefix_cache"].get("holds_total") for rank in live.ranks()],
    }


# ---- times


def ttft(live: Live, lengths: tuple[int, ...] = (2048, 8192), repeats: int = 5) -> list[dict[str, Any]]:
    """Median time to the first token without and with a hit. suffix_prefill: the server's own time for the tokens it computed."""
    rows = []
    for length in lengths:
        live.reset()
        messages = [{"role": "user", "content": live.text(list(range(length - 12)))}]
        body = {**BASE, "messages": messages, "session_id": f"ttft-{length}"}
        cold = [live.api.chat({**body, "prefix_cache": False}).ttft_s for _ in range(3)]
        live.api.chat(body)
        warm, rest, cached = [], [], 0
        for _ in range(repeats):
            answer, prefill_s = _timed(live, body)
            warm.append(answer)
            rest.append(1 - prefill_s / answer)
            cached = live.ask(messages, session_id=body["session_id"])["usage"]["prompt_cache_hit_tokens"]
        rows.append(
            {
                "prompt_tokens": len(live.ids(messages)),
                "cached": cached,
                "without_ms": 1e3 * statistics.median(cold),
                "with_ms": 1e3 * statistics.median(warm),
                "ratio": statistics.median(warm) / statistics.median(cold),
                "not_suffix_prefill": statistics.median(rest),
            }
        )
    return rows


def _timed(live: Live, body: dict[str, Any]) -> tuple[float, float]:
    """(time to the first token, prefill time by the histogram of the server's ranks)."""
    before = _prefill_seconds(live)
    ttft_s = live.api.chat(body).ttft_s
    return ttft_s, _prefill_seconds(live) - before


def _prefill_seconds(live: Live) -> float:
    text = live.http.get("/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("deepinfer:request_prefill_time_seconds_sum"))


# ---- a soak


def soak(live: Live, seconds: float, threads: int = 8) -> dict[str, Any]:
    """Random conversations with aborts until the time is over, then every resource must be back."""
    stop_at, counts, lock = time.monotonic() + seconds, {"finished": 0, "left": 0, "refused": 0}, threading.Lock()
    rss = [live.rss_bytes()]

    def work(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < stop_at:
            kind = _one(live, rng)
            with lock:
                counts[kind] += 1

    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(work, number) for number in range(threads)]
        while not all(job.done() for job in jobs):
            time.sleep(min(15.0, max(0.2, seconds / 8)))
            rss.append(live.rss_bytes())
        for job in jobs:
            job.result()
    time.sleep(2.0)
    return {**counts, "rss_mib": [round(value / 2**20) for value in rss], "leaks": leaks(live), "ranks": [_facts(r) for r in live.ranks()]}


def _one(live: Live, rng: random.Random) -> str:
    size, theme = rng.choice((200, 600, 1500)), 1000 * rng.randrange(3)
    system = {"role": "system", "content": live.text([theme + i for i in range(400)])}
    body = {**BASE, "messages": [system, {"role": "user", "content": live.text([rng.randrange(999) for _ in range(size)])}]}
    body |= {"max_tokens": rng.choice((1, 8, 40, 400)), "ignore_eos": True}
    if rng.random() < 0.3:
        patience = httpx.Timeout(600, read=rng.choice((0.02, 0.1, 0.4)))
        try:
            httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=patience, trust_env=False)
        except httpx.ReadTimeout:
            return "left"
        return "finished"
    status = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=600, trust_env=False).status_code
    return "finished" if status == 200 else "refused"


def leaks(live: Live) -> list[str]:
    """What is not back although nothing runs."""
    found = []
    for rank in live.ranks():
        cache, frames = rank["prefix_cache"], rank["prefix_cache"]["frames"]
        facts = {
            "running": rank["running"],
            "waiting": rank["waiting"],
            "device tokens": rank["kv"]["tokens_used"],
            "pinned sequences": cache["pinned_sequences"],
            "held requests": cache["held_requests"],
            "lost frames": cache["arena_bytes"] // cache["frame_bytes"] - sum(frames.values()),
            "checksum errors": cache["checksum_errors_total"],
        }
        found += [f"rank {rank['rank']}: {name} {value}" for name, value in facts.items() if value]
    return found


def _facts(rank: dict[str, Any]) -> dict[str, Any]:
    cache = rank["prefix_cache"]
    names = ("lookups_total", "hits_total", "evictions_total", "holds_total", "miss_total")
    return {"preemptions": rank["preemptions_total"], **{name: cache.get(name) for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("traces", "herd", "ttft", "soak"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--requests", type=int, default=64)
    options = parser.parse_args()
    live = Live(options.url)
    actions = {
        "traces": lambda: traces(live),
        "herd": lambda: herd(live, options.requests),
        "ttft": lambda: ttft(live),
        "soak": lambda: soak(live, options.seconds),
    }
    print(json.dumps(actions[options.what](), indent=1))


if __name__ == "__main__":
    main()
