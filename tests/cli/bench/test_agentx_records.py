"""From records to rows: what counts as good, and the numbers beside it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_cli.bench.aiperf_outputs import RECORDS, read_aggregate, read_log, read_server_counters
from deepinfer_cli.bench.aiperf_records import WARMUP, WINDOW, RequestRow, _percentile, chunk_gaps, read_records, request_rows, to_frame
from tests.cli.bench.agentx_samples import SAMPLE, failed, golden_traces, record, rows


@pytest.fixture(scope="module")
def golden() -> list[RequestRow]:
    return request_rows(read_records(SAMPLE / RECORDS), golden_traces(), "golden")


def test_golden_run_has_70_good_2_failed_and_3_truncated_requests(golden: list[RequestRow]) -> None:
    assert Counter(r.phase for r in golden) == {WARMUP: 4, WINDOW: 75}
    assert Counter(r.outcome for r in golden if r.phase == WINDOW) == {"ok": 70, "failed": 2, "truncated": 3}
    assert all(r.ok for r in golden if r.phase == WARMUP)


def test_harness_itself_counts_the_3_truncated_ones_as_good() -> None:
    aggregate = read_aggregate(SAMPLE)
    assert aggregate is not None
    assert (aggregate.num_ok, aggregate.num_failed) == (73, 2)


def test_numbers_equal_the_harness_s_on_its_own_definition(golden: list[RequestRow]) -> None:
    document = json.loads((SAMPLE / "profile_export_aiperf.json").read_bytes())
    told = [r for r in golden if r.phase == WINDOW and r.outcome != "failed"]
    columns = {"time_to_first_token": "ttft_ms", "inter_token_latency": "tpot_ms", "request_latency": "e2e_ms"}
    for name, column in columns.items():
        values = [getattr(r, column) for r in told if getattr(r, column) is not None]
        assert document[name]["count"] == len(values)
        for stat in ("p50", "p90", "p99"):
            assert np.percentile(values, float(stat[1:])) == pytest.approx(document[name][stat], rel=1e-9)
    gaps = chunk_gaps(read_records(SAMPLE / RECORDS))["gap_ms"].to_numpy(dtype=float)
    assert gaps.mean() == pytest.approx(document["inter_chunk_latency"]["avg"], rel=1e-5)
    ok = [r for r in told if r.ok]
    assert sum(r.output_tokens or 0 for r in ok) == document["total_osl"]["avg"]
    assert sum(r.cached_tokens or 0 for r in ok) == document["total_usage_prompt_cache_read_tokens"]["avg"]


def test_hit_rate_of_client_and_server_agree_on_the_golden_run(golden: list[RequestRow]) -> None:
    ok = [r for r in golden if r.phase == WINDOW and r.ok]
    counters = read_server_counters(SAMPLE)
    assert counters is not None
    assert [r.rank for r in counters.ranks] == ["0", "1"]
    client = sum(r.cached_tokens or 0 for r in ok) / sum(r.prompt_tokens or 0 for r in ok)
    assert counters.hit_share == pytest.approx(client, abs=0.01)


def test_kinds_and_requested_tokens_come_from_the_trace(golden: list[RequestRow]) -> None:
    assert {"main", "helper", "sidecar"} == {r.kind for r in golden}
    assert all(r.requested_tokens == 1 for r in golden if r.phase == WARMUP)
    assert all(r.output_tokens == r.requested_tokens for r in golden if r.ok)


def test_four_sessions_at_once_fill_four_lanes_and_finished_lanes_are_used_again(golden: list[RequestRow]) -> None:
    assert {r.lane for r in golden} == {0, 1, 2, 3}
    assert len({r.root_id for r in golden}) > 4
    by_root = {r.root_id: {x.lane for x in golden if x.root_id == r.root_id} for r in golden}
    assert all(len(lanes) == 1 for lanes in by_root.values())


def test_window_starts_at_its_first_request_and_warmup_lies_before(golden: list[RequestRow]) -> None:
    assert min(r.start_s for r in golden if r.phase == WINDOW) == 0
    assert all(r.start_s < 0 for r in golden if r.phase == WARMUP)
    assert all(r.queue_ms is not None and 0 <= r.queue_ms < 50 for r in golden)


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        (record(1), "ok"),
        (record(1, metrics={"usage_completion_tokens": None}), "truncated"),
        (record(1, metrics={"usage_completion_tokens": 3}), "truncated"),
        (record(1, metrics={"usage_completion_tokens": 500}), "ok"),
        (failed(1), "failed"),
        (record(1, was_cancelled=True), "cancelled"),
        (failed(1) | {"metadata": record(1, was_cancelled=True)["metadata"]}, "cancelled"),
        (record(1, source_trace_id="elsewhere", metrics={"osl_mismatch_diff_pct": -50.0}), "truncated"),
        (record(1, source_trace_id="elsewhere", metrics={"osl_mismatch_diff_pct": 0.0}), "ok"),
    ],
)
def test_outcome_of_a_record(made: dict[str, Any], outcome: str) -> None:
    assert rows([made])[0].outcome == outcome


def test_error_text_is_the_server_s_own_words() -> None:
    assert rows([failed(1, '{"error": {"message": "out of blocks"}}')])[0].error_text == "out of blocks"
    event = """SSEResponseError('Error: SSEMessage(packets=[SSEField(value=\\'{"error":{"message":"a rank died","code":"x"}}\\')])')"""
    assert rows([failed(1, event)])[0].error_text == "a rank died"
    assert rows([failed(1, '{"error": {broken}}')])[0].error_text == '{"error": {broken}}'
    assert rows([failed(1, "plain words")])[0].error_text == "plain words"
    refused = record(1) | {"error": {"type": "ClientConnectorError", "message": "long story", "cause": "ConnectionRefusedError(111)"}}
    assert rows([refused])[0].error_text == "ConnectionRefusedError(111)"


def test_rank_is_read_from_the_header_whatever_its_case() -> None:
    made = record(1) | {"trace_data": {"response_headers": {"x-deepinfer-RANK": "3"}}}
    assert rows([made])[0].rank == 3
    assert rows([record(1)])[0].rank is None


def test_stall_is_a_gap_over_50_ms_and_over_five_times_the_median() -> None:
    assert rows([record(1, metrics={"inter_chunk_latency": [10.0] * 9 + [51.0]})])[0].stalls == 1
    assert rows([record(1, metrics={"inter_chunk_latency": [10.0] * 9 + [49.0]})])[0].stalls == 0
    assert rows([record(1, metrics={"inter_chunk_latency": [30.0] * 9 + [149.0]})])[0].stalls == 0


def test_several_tokens_in_a_chunk_are_counted() -> None:
    made = rows([record(1, metrics={"inter_chunk_latency": [8.0] * 4, "usage_completion_tokens": 40})])[0]
    assert (made.chunks, made.tokens_per_chunk) == (5, 8.0)


def test_torn_last_line_of_an_interrupted_run_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record(1)) + "\n" + json.dumps(record(2))[:50])
    assert len(list(read_records(path))) == 1
    assert list(read_records(tmp_path / "none")) == []


def test_bad_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record(1)) + "\nnot json\n" + json.dumps(record(2)) + "\n")
    with pytest.raises(ValueError, match=":2 is not JSON"):
        list(read_records(path))


def test_table_keeps_its_column_types_when_it_is_empty_or_full_of_gaps() -> None:
    empty, failures = to_frame([]), to_frame(rows([failed(1), failed(2)]))
    assert len(empty) == 0
    assert dict(empty.dtypes) == dict(failures.dtypes)
    assert str(empty["rank"].dtype) == "Int64"
    assert str(failures["ttft_ms"].dtype) == "float64"


def test_old_aggregate_of_another_run_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "profile_export_aiperf.json"
    path.write_bytes((SAMPLE / path.name).read_bytes())
    assert read_aggregate(tmp_path, path.stat().st_mtime - 1) is not None
    assert read_aggregate(tmp_path, path.stat().st_mtime + 1) is None


def test_log_tells_of_requests_that_are_in_no_record() -> None:
    lines = """
07:51:27.108 NOTICE   Phase profiling (profiling) started | phase_index=0 | target: 8.0s duration (runner.py:660)
07:51:35.109 NOTICE   Phase profiling (profiling) sending complete | sent=26, completed=24, in_flight=2 | sessions: sent=5, completed=3
07:51:50.110 ERROR    Timeout waiting 10.0s for cancelled credits to return.
07:51:50.111 \x1b[1mNOTICE\x1b[0m   Phase profiling (profiling) complete | completed=25, cancelled=1 | sessions: completed=3, cancelled=0
""".splitlines()
    facts = read_log(lines)
    assert (facts.sent, facts.cancelled, facts.window_began) == (26, 1, True)
    assert facts.last_error == "Timeout waiting 10.0s for cancelled credits to return."
    assert read_log([]).window_began is False


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentile_is_the_one_numpy_computes(values: list[float], share: float) -> None:
    assert _percentile(values, share) == pytest.approx(float(np.percentile(values, share * 100)), rel=1e-9, abs=1e-9)
