"""Raw records of a run -> parquet tables. The only place that knows the columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from deepinfer_cli.bench.records import Outcome
from deepinfer_cli.bench.runs import read_lines
from deepinfer_cli.outputs import output

INTEGERS = ("prompt_tokens", "cached_tokens", "output_tokens", "rank", "drafted_tokens", "accepted_tokens")
# Our server's own account of one request, in seconds there and in ms here.
SERVER_TIMES = {"queue_s": "server_queue_ms", "restore_s": "restore_ms", "prefill_s": "prefill_ms", "first_output_s": "server_ttft_ms"}
FLOATS = ("ttft_ms", "tpot_ms", "itl_max_ms", "e2e_ms", "queue_ms", "tokens_per_chunk", *SERVER_TIMES.values())


def requests_table(run: str, raw: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per request. Times in ms, except `start_s`, `scheduled_s` and `end_s` from the start of the run."""
    rows = [_row(run, record) for record in raw]
    frame = pd.DataFrame(rows, columns=list(_row(run, EMPTY)))
    for name in INTEGERS:
        frame[name] = frame[name].astype("Int64")
    for name in FLOATS:
        frame[name] = frame[name].astype("float64")
    return frame.sort_values(["start_s", "request_id"], ignore_index=True)


EMPTY: dict[str, Any] = {
    "request_id": "", "conversation": 0, "turn": 0, "scheduled_s": 0.0, "start_s": 0.0, "first_s": None, "last_s": None, "end_s": None,
    "gaps_s": [], "chunks": 0, "prompt_tokens": None, "cached_tokens": None, "output_tokens": None, "requested_tokens": 0,
    "finish_reason": None, "rank": None, "outcome": Outcome.FAILED, "error_code": "", "error_text": "",
    "server": {},
}  # fmt: skip


def _row(run: str, record: dict[str, Any]) -> dict[str, Any]:
    first, last, start, end = record["first_s"], record["last_s"], record["start_s"], record["end_s"]
    tokens, gaps = record["output_tokens"], record["gaps_s"]
    # TPOT: (last - first token time) / (tokens - 1). Several tokens may share a chunk, so gaps alone would flatter.
    tpot = (last - first) / (tokens - 1) * 1e3 if tokens and tokens > 1 and first is not None and last is not None else None
    return {
        "run": run,
        "request_id": record["request_id"],
        "conversation": record["conversation"],
        "turn": record["turn"],
        "scheduled_s": record["scheduled_s"],
        "start_s": start,
        "end_s": end,
        "queue_ms": (start - record["scheduled_s"]) * 1e3,
        "ttft_ms": (first - start) * 1e3 if first is not None else None,
        "tpot_ms": tpot,
        "itl_max_ms": max(gaps) * 1e3 if gaps else None,
        "e2e_ms": (end - start) * 1e3 if end is not None else None,
        "prompt_tokens": record["prompt_tokens"],
        "cached_tokens": record["cached_tokens"],
        "output_tokens": tokens,
        "requested_tokens": record["requested_tokens"],
        "chunks": record["chunks"],
        "tokens_per_chunk": tokens / record["chunks"] if tokens and record["chunks"] else None,
        "rank": record["rank"],
        "finish_reason": record["finish_reason"],
        "ok": record["outcome"] == Outcome.OK,
        "outcome": str(record["outcome"]),
        "error_code": record["error_code"],
        "error_text": record["error_text"],
        **_server_times(record.get("server") or {}),
    }


def _server_times(server: dict[str, Any]) -> dict[str, Any]:
    times = {column: None if server.get(name) is None else server[name] * 1e3 for name, column in SERVER_TIMES.items()}
    return {**times, "drafted_tokens": server.get("drafted_tokens"), "accepted_tokens": server.get("accepted_tokens")}


def chunks_table(raw: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per gap between output chunks of good requests: request_id, i, gap_ms (float32)."""
    good = [record for record in raw if record["outcome"] == Outcome.OK]
    frame = pd.DataFrame(
        {
            "request_id": [r["request_id"] for r in good for _ in r["gaps_s"]],
            "i": [i for r in good for i in range(len(r["gaps_s"]))],
            "gap_ms": [gap * 1e3 for r in good for gap in r["gaps_s"]],
        }
    )
    return frame.astype({"gap_ms": "float32", "i": "int32"})


def timeline_table(samples: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per sample and rank of the server's counters; `at_s` from the start of the run."""
    rows = []
    for sample in samples:
        for rank in sample["metrics"].get("ranks") or []:
            kv, tokens, cache = (rank.get(k) or {} for k in ("kv", "tokens", "prefix_cache"))
            rows.append(
                {
                    "at_s": sample["at_s"],
                    "rank": rank.get("rank"),
                    "running": rank.get("running"),
                    "waiting": rank.get("waiting"),
                    "kv_used_tokens": kv.get("tokens_used"),
                    "kv_total_tokens": kv.get("tokens_total"),
                    "prompt_total": tokens.get("prompt_total"),
                    "cached_total": tokens.get("cached_total"),
                    "generated_total": tokens.get("generated_total"),
                    "lookup_tokens_total": cache.get("lookup_tokens_total"),
                    "hit_tokens_total": cache.get("hit_tokens_total"),
                    "store_tokens_total": cache.get("store_tokens_total"),
                    "evicted_tokens_total": cache.get("evicted_tokens_total"),
                    "steps_total": rank.get("steps_total"),
                }
            )
    return pd.DataFrame(rows)


def write_tables(folder: Path, run: str) -> pd.DataFrame:
    """Parquet files from what the generator and the sampler left in `folder`. Returns the requests."""
    raw = read_lines(folder / "requests.jsonl")
    requests = requests_table(run, raw)
    write_parquet(requests, folder / "requests.parquet")
    write_parquet(chunks_table(raw), folder / "chunks.parquet")
    write_parquet(timeline_table(read_lines(folder / "samples.jsonl")), folder / "timeline.parquet")
    return requests


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    with output(path) as place:
        frame.to_parquet(place, index=False)
