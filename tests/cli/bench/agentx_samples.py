"""Rows, plans and evidence for tests: one good request and what a test changes about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from deepinfer_cli.bench.agentx_traces import TraceSet, read_traces
from deepinfer_cli.bench.agentx_verdict import Evidence
from deepinfer_cli.bench.aiperf_command import AgentxPlan
from deepinfer_cli.bench.aiperf_outputs import Aggregate, ServerCounters
from deepinfer_cli.bench.aiperf_records import RequestRow, request_rows

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "agentx"
SAMPLE = GOLDEN / "sample-run"
SECOND_NS = 1_000_000_000
EPOCH_NS = 1_800_000_000 * SECOND_NS


def golden_traces() -> TraceSet:
    return read_traces("golden", GOLDEN / "traces")


def plan(**changes: Any) -> AgentxPlan:
    """A 60 s window of three sessions on the golden traces."""
    base = AgentxPlan(
        "http://127.0.0.1:1", "tiny", Path("tokenizer"), golden_traces(), concurrency=3, duration_s=60.0, grace_s=10.0, warmup_s=6.0
    )
    return dataclasses.replace(base, **changes)


def record(
    index: int, *, at_s: float | None = None, warmup: bool = False, metrics: dict[str, Any] | None = None, **meta: Any
) -> dict[str, Any]:
    """A record as the harness writes it: turn `index % 10` of the linear session, one per second, 100 ms long."""
    start = EPOCH_NS + round((index if at_s is None else at_s) * SECOND_NS)
    turn = index % 10
    asked = golden_traces().recorded("syn-linear", turn)
    assert asked is not None
    output = 1 if warmup else asked.output_tokens
    values: dict[str, Any] = {
        "time_to_first_token": 20.0,
        "request_latency": 100.0,
        "inter_token_latency": 1.0,
        "inter_chunk_latency": [1.0] * max(0, output - 1),
        "usage_prompt_tokens": asked.prompt_tokens + 20,
        "usage_completion_tokens": output,
        "usage_prompt_cache_read_tokens": 0,
        "http_req_connection_reused": 1,
    }
    values |= metrics or {}
    base = {
        "x_request_id": f"r{index}{'w' if warmup else ''}",
        "x_correlation_id": f"s{index // 10}",
        "root_correlation_id": f"s{index // 10}",
        "conversation_id": "syn-linear",
        "source_trace_id": "syn-linear",
        "source_outer_idx": turn,
        "source_kind": "weka_main",
        "turn_index": turn,
        "agent_depth": 0,
        "credit_issued_ns": start - 1_000_000,
        "request_start_ns": start,
        "request_end_ns": start + 100_000_000,
        "benchmark_phase": "warmup" if warmup else "profiling",
        "was_cancelled": False,
    }
    return {"metadata": base | meta, "metrics": {name: {"value": value, "unit": ""} for name, value in values.items() if value is not None}}


def failed(index: int, message: str = "injected failure", code: int | None = 500) -> dict[str, Any]:
    return record(index) | {"metrics": {}, "error": {"code": code, "type": "Internal Server Error", "message": message}}


def rows(records: list[dict[str, Any]]) -> list[RequestRow]:
    return request_rows(records, golden_traces(), "run")


def good_records(count: int = 60) -> list[dict[str, Any]]:
    return [record(i) for i in range(count)]


AGGREGATE = Aggregate(
    version="0.13.0",
    was_cancelled=False,
    is_complete=True,
    incomplete_reason="",
    submission_valid=False,
    submission_reasons=("unsafe_override",),
    num_ok=60,
    num_failed=0,
    num_overflows=0,
    start_delay_p99_ms=3.0,
    output_tok_s=100.0,
    ideal_hit_share=0.8,
)


def evidence(records: list[dict[str, Any]] | None = None, **changes: Any) -> Evidence:
    """A valid run of 60 requests, except for what the test changes."""
    base = Evidence(plan(), rows(good_records() if records is None else records), 0, AGGREGATE, ServerCounters(1, 1))
    return dataclasses.replace(base, **changes)
