"""From the harness's records to one row per request, in the schema that every load generator of dix shares.

The harness's names are not ours: its `inter_token_latency` is TPOT here, its `inter_chunk_latency` is ITL. Its idea of success is not ours
either: a stream that broke off without an `event: error` line has no error in the record, only fewer tokens, or none counted at all.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli.bench.agentx_traces import TraceSet

if TYPE_CHECKING:
    import pandas as pd

OK, FAILED, TRUNCATED, CANCELLED = "ok", "failed", "truncated", "cancelled"
RANK_HEADER = "x-deepinfer-rank"
STALL_MS, STALL_FACTOR = 50.0, 5.0
ERROR_TEXT = 400  # characters kept of an error's text
WARMUP, WINDOW = "warmup", "window"
# A failed stream's message is the harness's rendering of an event, with the body somewhere inside.
_ERROR_BODY = re.compile(r'\{\s*"error"\s*:\s*\{.*?\}\s*\}')


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. Times in ms except `start_s`, which counts from the first request of the window; None where there is nothing to say."""

    run: str
    phase: str
    request_id: str
    session_id: str
    root_id: str
    parent_id: str | None
    trace: str
    conversation: str
    kind: str
    depth: int
    turn: int
    lane: int
    scheduled_s: float
    start_s: float
    end_s: float
    queue_ms: float | None
    ttft_ms: float | None
    ttfo_ms: float | None
    tpot_ms: float | None
    itl_max_ms: float | None
    itl_p99_ms: float | None
    stalls: int
    e2e_ms: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    requested_tokens: int | None
    recorded_prompt_tokens: int | None
    chunks: int
    tokens_per_chunk: float | None
    rank: int | None
    reused_conn: bool | None
    finish_reason: str | None
    ok: bool
    outcome: str
    error_code: str
    error_type: str
    error_text: str
    start_ns: int
    end_ns: int


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of `profile_export.jsonl`. A torn last line, as an interrupted run leaves it, is passed over; any other bad line is an error.

    Raises: ValueError for a line in the middle that is not JSON.
    """
    if not path.exists():
        return
    bad: str | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if bad:
                raise ValueError(bad)
            try:
                record = json.loads(line)
            except ValueError as error:
                bad = f"{path}:{number} is not JSON: {error}"
                continue
            yield record


def request_rows(records: Iterable[Mapping[str, Any]], traces: TraceSet, run: str = "") -> list[RequestRow]:
    """All rows in order of their start, warm-up included. Records are let go one by one: their gaps are most of their size."""
    drafts = sorted((_draft(record, traces) for record in records), key=lambda draft: int(draft["start_ns"]))
    starts = [draft["start_ns"] for draft in drafts if draft["phase"] == WINDOW] or [draft["start_ns"] for draft in drafts[:1]]
    lanes = _assign_lanes(drafts)
    return [_finish(draft, run, starts[0], lanes) for draft in drafts]


def _finish(draft: dict[str, Any], run: str, origin_ns: int, lanes: Mapping[str, int]) -> RequestRow:
    """Adds what only all records together tell."""
    start_s = (draft["start_ns"] - origin_ns) / 1e9
    return RequestRow(
        run=run,
        lane=lanes[draft["root_id"]],
        scheduled_s=start_s - (draft["queue_ms"] or 0.0) / 1e3,
        start_s=start_s,
        end_s=(draft["end_ns"] - origin_ns) / 1e9,
        **draft,
    )


def _is_warmup(metadata: Mapping[str, Any]) -> bool:
    return str(metadata.get("benchmark_phase")) == "warmup"


def _root(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("root_correlation_id") or metadata.get("x_correlation_id") or metadata.get("x_request_id"))


def _assign_lanes(drafts: list[dict[str, Any]]) -> dict[str, int]:
    """Root -> lane. The harness does not say which lane a session ran in: a new session takes the lane that has been free the longest."""
    spans: dict[str, list[int]] = {}
    for draft in drafts:
        span = spans.setdefault(draft["root_id"], [draft["start_ns"], draft["end_ns"]])
        span[1] = max(span[1], draft["end_ns"])
    free_at: list[int] = []
    lanes: dict[str, int] = {}
    for root, (start, end) in spans.items():
        lane = min((i for i, at in enumerate(free_at) if at <= start), key=lambda i: free_at[i], default=len(free_at))
        free_at[lane : lane + 1] = [end]
        lanes[root] = lane
    return lanes


class _Metrics:
    """Reads `{name: {value, unit}}` without a chain of lookups per field."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = metrics

    def number(self, *names: str) -> float | None:
        """The first name that is present."""
        for name in names:
            if name in self._metrics and self._metrics[name].get("value") is not None:
                return float(self._metrics[name]["value"])
        return None

    def count(self, *names: str) -> int | None:
        value = self.number(*names)
        return None if value is None else int(value)

    def gaps(self) -> list[float]:
        value = self._metrics.get("inter_chunk_latency", {}).get("value")
        return [float(v) for v in value] if isinstance(value, list) else []


def _draft(record: Mapping[str, Any], traces: TraceSet) -> dict[str, Any]:
    """The columns that one record tells by itself."""
    meta, read, error = record["metadata"], _Metrics(record.get("metrics") or {}), record.get("error")
    warmup = _is_warmup(meta)
    source = (str(meta.get("source_trace_id")), int(meta.get("source_outer_idx", -1)), int(meta.get("source_inner_idx", -1)))
    recorded = traces.recorded(*source)
    asked = None if recorded is None else 1 if warmup else max(1, recorded.output_tokens)
    output = read.count("usage_completion_tokens", "output_sequence_length")
    outcome = classify(meta, error, read.count("usage_completion_tokens"), asked, read.number("osl_mismatch_diff_pct"))
    return {
        "phase": WARMUP if warmup else WINDOW,
        **_identity(meta),
        **_times(meta, read),
        **_sizes(read, output),
        "requested_tokens": asked,
        "recorded_prompt_tokens": None if recorded is None else recorded.prompt_tokens,
        "rank": _rank(record),
        "finish_reason": None,
        "ok": outcome == OK,
        "outcome": outcome,
        "error_code": str(error.get("code") or "") if error else "",
        "error_type": str(error.get("type", "")) if error else "",
        "error_text": _error_text(error) if error else _shortfall(outcome, output, asked),
    }


def _identity(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "request_id": str(meta.get("x_request_id", "")),
        "session_id": str(meta.get("x_correlation_id", "")),
        "root_id": _root(meta),
        "parent_id": meta.get("parent_correlation_id"),
        "trace": str(meta.get("source_trace_id", "")),
        "conversation": str(meta.get("conversation_id", "")),
        "kind": _kind(meta),
        "depth": int(meta.get("agent_depth", 0)),
        "turn": int(meta.get("turn_index", 0)),
    }


def _times(meta: Mapping[str, Any], read: _Metrics) -> dict[str, Any]:
    start, end = int(meta["request_start_ns"]), int(meta["request_end_ns"])
    issued, gaps = meta.get("credit_issued_ns"), read.gaps()
    return {
        "start_ns": start,
        "end_ns": end,
        "queue_ms": (start - int(issued)) / 1e6 if issued else None,
        "ttft_ms": read.number("time_to_first_token"),
        "ttfo_ms": read.number("time_to_first_output_token"),
        "tpot_ms": read.number("inter_token_latency"),
        "e2e_ms": read.number("request_latency"),
        "itl_max_ms": max(gaps, default=None),
        "itl_p99_ms": _percentile(gaps, 0.99),
        "stalls": _stalls(gaps),
    }


def _sizes(read: _Metrics, output: int | None) -> dict[str, Any]:
    gaps, reused = read.gaps(), read.number("http_req_connection_reused")
    chunks = len(gaps) + 1 if gaps or read.number("time_to_first_token") is not None else 0
    return {
        "prompt_tokens": read.count("usage_prompt_tokens", "input_sequence_length"),
        "cached_tokens": read.count("usage_prompt_cache_read_tokens"),
        "output_tokens": output,
        "reasoning_tokens": read.count("usage_reasoning_tokens", "reasoning_token_count"),
        "chunks": chunks,
        "tokens_per_chunk": output / chunks if output and chunks else None,
        "reused_conn": None if reused is None else bool(reused),
    }


def classify(meta: Mapping[str, Any], error: Any, counted: int | None, asked: int | None, mismatch_pct: float | None = None) -> str:
    """ok, failed, truncated or cancelled. `counted`: completion tokens the server reported, None when it reported none.

    Every request asks for an exact length with `ignore_eos`, so fewer tokens mean a stream that broke off or a server that cut it short.
    Without a trace to ask (a public corpus) the harness's own mismatch decides.
    """
    if meta.get("was_cancelled"):
        return CANCELLED
    if error:
        return FAILED
    if counted is None:
        return TRUNCATED
    short = counted < asked if asked is not None else (mismatch_pct or 0) < 0
    return TRUNCATED if short else OK


def _kind(meta: Mapping[str, Any]) -> str:
    if ":aux:" in str(meta.get("conversation_id", "")):
        return "sidecar"
    return "main" if meta.get("source_kind") == "weka_main" else "helper"


def _rank(record: Mapping[str, Any]) -> int | None:
    headers = (record.get("trace_data") or {}).get("response_headers") or {}
    value = next((v for k, v in headers.items() if k.lower() == RANK_HEADER), None)
    return int(value) if value is not None and str(value).isdigit() else None


def _error_text(error: Mapping[str, Any]) -> str:
    """The server's own words where the message holds its JSON body; the operating system's where a connection failed."""
    text = str(error.get("cause") or error.get("message") or "")
    if body := _ERROR_BODY.search(text):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = str(json.loads(body[0])["error"]["message"])
    return text[:ERROR_TEXT]


def _shortfall(outcome: str, output: int | None, asked: int | None) -> str:
    if outcome != TRUNCATED:
        return ""
    return "no token count" if output is None else f"{output} of {asked} tokens"


def _percentile(values: list[float], share: float) -> float | None:
    """Linear interpolation, as numpy does by default."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _stalls(gaps: list[float]) -> int:
    """Gaps between chunks that a reader would notice: over 50 ms and over five times the stream's own median."""
    if not gaps:
        return 0
    limit = max(STALL_MS, STALL_FACTOR * (_percentile(gaps, 0.5) or 0.0))
    return sum(gap > limit for gap in gaps)


# Columns that may be empty keep their type: a column of nothing but gaps must not turn into floats or objects.
COLUMN_TYPES = {
    "str": "string",
    "str | None": "string",
    "int": "int64",
    "int | None": "Int64",
    "float": "float64",
    "float | None": "float64",
    "bool": "bool",
    "bool | None": "boolean",
}


def to_frame(rows: Iterable[RequestRow]) -> pd.DataFrame:
    """The rows as a table with fixed column types, also when there are none."""
    import pandas as pd

    frame = pd.DataFrame([asdict(row) for row in rows], columns=[f.name for f in fields(RequestRow)])
    return frame.astype({f.name: COLUMN_TYPES[str(f.type)] for f in fields(RequestRow)})


def chunk_gaps(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Every gap between two chunks of the window: request_id, i, gap_ms float32."""
    import numpy as np
    import pandas as pd

    ids: list[str] = []
    indexes, values = [], []
    for record in records:
        gaps = _Metrics(record.get("metrics") or {}).gaps()
        if gaps and not _is_warmup(record["metadata"]):
            ids += [str(record["metadata"].get("x_request_id", ""))] * len(gaps)
            indexes.append(np.arange(len(gaps), dtype=np.int32))
            values.append(np.asarray(gaps, dtype=np.float32))
    empty = np.zeros(0)
    return pd.DataFrame(
        {
            "request_id": pd.Series(ids, dtype="string"),
            "i": np.concatenate(indexes) if indexes else empty.astype(np.int32),
            "gap_ms": np.concatenate(values) if values else empty.astype(np.float32),
        }
    )
