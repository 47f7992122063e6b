"""A scripted engine with the interface of `engine.engine.Engine`: known tokens, chosen delays, a record of every prompt. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import RequestError
from engine.request import FinishReason, Output, Request, Timing, TokenLogprob
from server.launch import Launch

SCRIPT_FILE = "fake.json"
KEPT_FILE = "kept.jsonl"  # one line per prompt that was pinned


@dataclass(frozen=True)
class FakeLimits:
    max_model_len: int = 4096
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    vocab_size: int = 4096
    eos_token_id: int = 1
    keep_tokens: int = 140
    num_blocks: int = 64
    precision: str = "F"
    device: str = "cpu"


@dataclass
class _Running:
    request: Request
    script: list[int]
    cached: int
    sent: int = 0
    started_s: float = 0.0


class FakeEngine:
    """Emits the scripted answer one token per step. A prompt seen before counts as cached except for its last token.

    Script file (JSON, re-read for every request): {"tokens": [ids of the answer, EOS last], "delay_s": per step, "prefill_s": before
    the first token, "crash_on": prompt that kills the rank, "record": path that receives one line of prompt ids per request}.
    """

    def __init__(self, script: Path, rank: int) -> None:
        self.limits = FakeLimits()
        self.kv_format = ""
        self.idle = True
        self.left = self.waits_for_peers = False
        self._path = script
        self._rank = rank
        self._running: dict[str, _Running] = {}
        self._aborted: list[str] = []
        self._seen: set[tuple[int, ...]] = set()
        self._steps = 0
        self._counts = {"prompt": 0, "cached": 0, "generated": 0, "lookups": 0, "lookup_tokens": 0, "hits": 0}
        self.prefill_intervals = self._proposed = (70, 1)

    def _script(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def add_request(self, request: Request) -> None:
        if len(request.prompt_token_ids) >= self.limits.max_model_len:
            raise RequestError("prompt too long")
        script = self._script()
        if record := script.get("record"):
            with open(record, "a") as file:
                line = {
                    "rank": self._rank,
                    "pid": os.getpid(),
                    "ids": request.prompt_token_ids,
                    "max_tokens": request.params.max_tokens,
                    "seed": request.params.seed,
                    "temperature": request.params.temperature,
                    "read": request.cache_read,
                    "salt": request.cache_salt,
                    "scope": request.cache_scope,
                    "priority": [request.cache_priority, request.cache_priority_s],
                    "anchor": request.cache_anchor_tokens,
                    "store_answer": request.cache_decode,
                }
                file.write(json.dumps(line) + "\n")
        key = tuple(request.prompt_token_ids)
        cached = len(key) - 1 if key in self._seen and request.cache_read else 0
        if request.cache_write:
            self._seen.add(key)
        tokens = [1] if request.request_id == "warm-up" else list(script.get("tokens", [300, 301, 302, 1]))
        delay = 0.0 if request.request_id == "warm-up" else script.get("prefill_s", 0.0)
        if request.prompt_token_ids == script.get("crash_on"):
            raise RuntimeError("scripted crash")
        self._running[request.request_id] = _Running(request, tokens, cached, started_s=time.monotonic() + delay)
        self._counts["prompt"] += len(key)
        self._counts["cached"] += cached
        if request.cache_read:
            self._counts["lookups"] += 1
            self._counts["lookup_tokens"] += len(key)
            self._counts["hits"] += cached > 0
        self.idle = False

    def abort(self, request_id: str) -> None:
        self._aborted.append(request_id)

    def step(self) -> list[Output]:
        self._steps += 1
        self.prefill_intervals = self._proposed
        outputs = [Output(name, [], FinishReason.ABORT) for name in self._aborted if self._running.pop(name, None)]
        self._aborted.clear()
        now = time.monotonic()
        live = [item for item in self._running.values() if item.started_s <= now]
        if live and (delay := self._script().get("delay_s", 0.0)):
            time.sleep(delay)
        outputs += [self._advance(item) for item in live]
        if self._running and not live:
            time.sleep(0.002)
        self.idle = not self._running
        return outputs

    def _advance(self, item: _Running) -> Output:
        params, first = item.request.params, item.sent == 0
        token = item.script[item.sent % len(item.script)]
        item.sent += 1
        self._counts["generated"] += 1
        reason, stop_id = None, None
        if (token == self.limits.eos_token_id and not params.ignore_eos) or token in params.stop_token_ids:
            reason, stop_id = FinishReason.STOP, token
        elif item.sent >= params.max_tokens:
            reason = FinishReason.LENGTH
        if reason:
            del self._running[item.request.request_id]
        logprobs = [TokenLogprob(-0.5, [(token, -0.5), (token + 1, float("-inf"))][: params.top_logprobs])] if params.logprobs else []
        return Output(
            item.request.request_id,
            [token],
            reason,
            stop_id,
            tuple(logprobs),
            item.cached if first else None,
            Timing(0.0, 0.0, 0.0) if first else None,
        )

    def reset_prefix_cache(self) -> None:
        self._seen.clear()

    def set_prefill_intervals(self, attempt: int | None, any_: int | None) -> None:
        self._proposed = attempt or self.prefill_intervals[0], any_ or self.prefill_intervals[1]

    def keep_prefix(self, tokens: list[int], salt: str, ttl_s: float) -> dict[str, Any]:
        stored = max((_common(tokens, prompt) for prompt in self._seen), default=0)
        with self._path.with_name(KEPT_FILE).open("a") as file:
            file.write(json.dumps({"rank": self._rank, "ids": tokens, "salt": salt, "ttl_s": ttl_s}) + "\n")
        return {"pinned_tokens": stored if ttl_s else 0, "restorable_tokens": stored}

    def leave(self) -> None:
        self.left = True

    def stats(self) -> dict[str, Any]:
        count = self._counts
        tier = {"hit_tokens_total": count["cached"], "store_tokens_total": 0, "tokens_used": 0}
        return {
            "steps_total": self._steps,
            "running": len(self._running),
            "waiting": 0,
            "kv": {"tokens_total": 8192, "tokens_used": sum(len(r.request.prompt_token_ids) + r.sent for r in self._running.values())},
            "tokens": {"prompt_total": count["prompt"], "cached_total": count["cached"], "generated_total": count["generated"]},
            "prefix_cache": {
                "lookups_total": count["lookups"],
                "lookup_tokens_total": count["lookup_tokens"],
                "hits_total": count["hits"],
                "hit_tokens_total": count["cached"],
                "stores_total": 0,
                "store_tokens_total": 0,
                "evictions_total": 0,
                "evicted_tokens_total": 0,
                "miss_total": {"no_page": count["lookups"] - count["hits"]},
                "frames": {"free": 9, "page": 1},
                "evicted_frames_total": {"page/lru": count["lookups"]},
                "restore_seconds_total": 0.0005,
                "restore_seconds_buckets_total": {"0.001": count["lookups"], "+Inf": count["lookups"]},
                "tiers": {"device": dict.fromkeys(tier, 0), "host": tier, "disk": dict.fromkeys(tier, 0)},
            },
            "spec": {"drafts_total": 0, "draft_tokens_total": 0, "accepted_tokens_total": 0},
            "preemptions_total": 0,
        }

    def explain_prompt(self, tokens: list[int], salt: str = "", scope: str = "") -> dict[str, Any]:
        nearest = max(self._seen, key=lambda ids: _common(ids, tokens), default=())
        at = _common(nearest, tokens)
        difference = None if at in (0, len(tokens), len(nearest)) else {"index": at, "stored": nearest[at:][:12], "asked": tokens[at:][:12]}
        return {"prompt_tokens": len(tokens), "matched_tokens": at, "salt": salt, "scope": scope, "first_difference": difference}

    def inject_fault(self, kind: str, **where: Any) -> dict[str, Any]:
        if kind != "flip":
            raise ValueError(f"unknown fault {kind!r}")
        return {"flipped": 1, **where}

    def close(self) -> None:
        self._running.clear()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def build(launch: Launch, rank: int, incarnation: int, on_progress: Callable[[str, float], None]) -> FakeEngine:
    """Engine factory of the tests. `fail_load` in the script makes loading fail."""
    path = Path(launch.server_dir) / SCRIPT_FILE
    on_progress("weights", 1.0)
    if path.exists() and json.loads(path.read_text()).get("fail_load"):
        raise RuntimeError("scripted load failure")
    helper = subprocess.Popen(["sleep", "300"])  # as a compiler or loader of a real engine: it lives in the rank's group
    (path.parent / "helper.pid").write_text(str(helper.pid))
    return FakeEngine(path, rank)
