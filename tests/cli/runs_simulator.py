"""Runs without a server: a queue in front of a server whose speed drifts, drawn from a seed. For proofs about statistics and size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from deepinfer_cli.outputs import write_json

BETWEEN_RUNS = 0.02  # standard deviation of a run's own speed factor: clocks, neighbours, temperature
WINDOW_S = 300.0


def simulated_numbers(seed: int, requests: int = 400, ttft_factor: float = 1.0) -> dict[str, Any]:
    """Poisson arrivals, log-normal service with a slow drift inside the run, TTFT with the queue of those before. Column -> values."""
    rng = np.random.default_rng(seed)
    speed = np.exp(rng.normal(0, BETWEEN_RUNS))
    start_s = np.sort(rng.uniform(0, WINDOW_S, requests))
    drift = 1 + 0.05 * np.sin(start_s / WINDOW_S * 2 * np.pi + rng.uniform(0, 2 * np.pi))
    service_ms = 120 * speed * drift * np.exp(rng.normal(0, 0.35, requests))
    gaps_ms = np.diff(start_s, prepend=start_s[:1] - 1) * 1e3
    waits_ms = np.maximum(0, service_ms - gaps_ms) * rng.uniform(0, 1, requests)
    ttft_ms = (service_ms + waits_ms) * ttft_factor
    tpot_ms = 11 * speed * drift * np.exp(rng.normal(0, 0.15, requests))
    output = rng.integers(16, 200, requests)
    prompt = rng.integers(400, 4000, requests)
    cached = (prompt * rng.beta(8, 2, requests) * np.exp(rng.normal(0, 0.002))).astype(int)
    e2e_ms = ttft_ms + tpot_ms * (output - 1)
    return {
        "start_s": start_s, "end_s": start_s + e2e_ms / 1e3, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms,
        "prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output, "server_queue_ms": waits_ms * ttft_factor,
        "restore_ms": service_ms * 0.1 * ttft_factor, "prefill_ms": service_ms * 0.85 * ttft_factor,
        "server_ttft_ms": (waits_ms + service_ms * 0.98) * ttft_factor,
    }  # fmt: skip


def simulated_requests(run: str, seed: int, requests: int = 400) -> pd.DataFrame:
    """The same as a whole table of requests: four turns a conversation, two ranks, all of them good."""
    numbers = simulated_numbers(seed, requests)
    index, output = np.arange(requests), numbers["output_tokens"]
    words = {"run": run, "finish_reason": "length", "ok": True, "outcome": "ok", "error_code": "", "error_text": ""}
    more = {
        "request_id": [f"{i // 4}-{i % 4}" for i in index],
        "conversation": index // 4,
        "turn": index % 4,
        "scheduled_s": numbers["start_s"],
        "queue_ms": 0.0,
        "itl_max_ms": numbers["tpot_ms"] * 2,
        "requested_tokens": output,
        "chunks": output,
        "tokens_per_chunk": 1.0,
        "rank": index % 2,
        "drafted_tokens": output * 2,
        "accepted_tokens": output // 2,
    }
    counted = ("prompt_tokens", "cached_tokens", "output_tokens", "rank", "drafted_tokens", "accepted_tokens")
    return pd.DataFrame({**numbers, **more}).assign(**words).astype(dict.fromkeys(counted, "Int64"))


def write_run(root: Path, name: str, requests: pd.DataFrame, *, gaps_each: int = 0, labels: dict[str, str] | None = None) -> Path:
    """A run directory as `dix bench run` leaves it."""
    folder = root / name
    folder.mkdir(parents=True)
    requests.to_parquet(folder / "requests.parquet", index=False)
    count = len(requests) * gaps_each
    rng = np.random.default_rng(1)
    chunks = pd.DataFrame(
        {
            "request_id": np.repeat(requests["request_id"].to_numpy(), gaps_each),
            "i": np.tile(np.arange(gaps_each, dtype=np.int32), len(requests)),
            "gap_ms": (11 * np.exp(rng.normal(0, 0.2, count))).astype(np.float32),
        }
    )
    chunks.to_parquet(folder / "chunks.parquet", index=False)
    pd.DataFrame().to_parquet(folder / "timeline.parquet", index=False)
    body: dict[str, Any] = {
        "schema": "dix.run/1", "id": name, "recipe": "simulated", "recipe_hash": "0", "status": "complete", "valid": True, "reasons": [],
        "labels": labels or {}, "started_unix_s": 0.0, "window_s": WINDOW_S, "server": {"url": "-", "model": "m", "ranks": 2},
        "harness": {"name": "dix load", "version": 1}, "notes": [], "stamp": None, "command": "-",
    }  # fmt: skip
    write_json(folder / "run.json", body)
    return folder
