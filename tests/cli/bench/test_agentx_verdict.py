"""Which runs may be believed, and the reason given for those that may not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from deepinfer_cli.bench.agentx_verdict import Evidence, as_json, judge
from deepinfer_cli.bench.aiperf_outputs import LogFacts, ServerCounters, read_aggregate, read_server_counters
from deepinfer_cli.bench.aiperf_records import request_rows
from tests.cli.bench.agentx_samples import AGGREGATE, SAMPLE, evidence, failed, golden_traces, good_records, plan, record, rows


def codes(made: Evidence) -> set[str]:
    return {reason.code for reason in judge(made).reasons}


def test_good_run_is_valid_and_a_short_one_is_not_comparable() -> None:
    verdict = judge(evidence())
    assert (verdict.valid, verdict.comparable, verdict.reasons) == (True, False, ())
    assert [reason.code for reason in verdict.not_comparable] == ["short_window"]
    assert verdict.counts.ok == 60


def test_long_valid_run_is_comparable_but_never_official_by_us() -> None:
    records = [record(i, at_s=15.0 * i) for i in range(60)]
    verdict = judge(evidence(records, plan=plan(duration_s=900.0)))
    assert (verdict.valid, verdict.comparable, verdict.official) == (True, True, False)
    submitted = dataclasses.replace(AGGREGATE, submission_valid=True)
    assert judge(evidence(aggregate=submitted)).official is True


def test_golden_run_is_not_valid_because_streams_broke_off() -> None:
    parsed = request_rows(_golden_records(), golden_traces())
    made = Evidence(plan(duration_s=20.0, grace_s=5.0), parsed, 0, read_aggregate(SAMPLE), read_server_counters(SAMPLE))
    verdict = judge(made)
    assert [reason.code for reason in verdict.reasons] == ["truncated"]
    assert (verdict.counts.ok, verdict.counts.failed, verdict.counts.truncated) == (70, 2, 3)


def _golden_records() -> Any:
    from deepinfer_cli.bench.aiperf_outputs import RECORDS
    from deepinfer_cli.bench.aiperf_records import read_records

    return read_records(SAMPLE / RECORDS)


def test_a_run_without_an_answer_says_nothing_of_the_cache() -> None:
    """Nobody answered, so nobody kept quiet about cached tokens either."""
    for records in ([], [failed(i) for i in range(3)]):
        told = [reason.code for reason in judge(evidence(records)).not_comparable]
        assert told == ["short_window"]


def test_exit_code_0_proves_nothing_and_another_one_is_a_reason() -> None:
    assert codes(evidence(aggregate=None)) == {"no_result"}
    broken = evidence(exit_code=1, log=LogFacts(last_error="tokenizer not loadable"))
    assert codes(broken) == {"harness_exit"}
    assert "tokenizer not loadable" in judge(broken).reasons[0].text


@pytest.mark.parametrize("change", [{"was_cancelled": True}, {"is_complete": False}])
def test_run_that_the_harness_gave_up_is_incomplete(change: dict[str, Any]) -> None:
    assert codes(evidence(aggregate=dataclasses.replace(AGGREGATE, **change))) == {"incomplete"}


def test_interrupted_run_says_so_once() -> None:
    cancelled = dataclasses.replace(AGGREGATE, was_cancelled=True, is_complete=False)
    assert codes(evidence(interrupted=True, aggregate=cancelled)) == {"interrupted"}


def test_failures_over_the_limit_name_the_first_three_distinct_errors() -> None:
    records = [failed(i, f"error {i % 4}") if i % 5 == 0 else record(i) for i in range(60)]
    verdict = judge(evidence(records))
    assert {reason.code for reason in verdict.reasons} == {"failed"}
    text = verdict.reasons[0].text
    assert "12 failed" in text
    assert text.count("500:") == 3


def test_failures_within_the_limit_leave_the_run_valid() -> None:
    records = [failed(i) if i in (3, 7) else record(i) for i in range(60)]
    assert codes(evidence(records)) == set()
    assert codes(evidence(records, plan=plan(max_failed=0.02))) == {"failed"}


def test_refused_connections_end_the_run_early() -> None:
    refused = [record(i) | {"metrics": {}, "error": {"type": "ClientConnectorError", "message": "refused"}} for i in range(12, 16)]
    stopped = dataclasses.replace(AGGREGATE, was_cancelled=True, is_complete=False)
    assert codes(evidence([*good_records(12), *refused], aggregate=stopped)) == {"incomplete", "failed", "coverage"}


def test_single_broken_stream_without_usage_is_enough() -> None:
    records = [record(i, metrics={"usage_completion_tokens": None}) if i == 30 else record(i) for i in range(60)]
    assert codes(evidence(records)) == {"truncated"}


def test_half_length_answers_are_found_although_all_of_them_look_good() -> None:
    records = [record(i, metrics={"usage_completion_tokens": 10}) if i % 20 == 5 else record(i) for i in range(60)]
    verdict = judge(evidence(records))
    assert {reason.code for reason in verdict.reasons} == {"short_answers"}
    assert verdict.counts.truncated == 3


def test_short_answers_are_blamed_on_the_server_s_own_count_of_errors() -> None:
    records = [record(i, metrics={"usage_completion_tokens": 10}) if i == 5 else record(i) for i in range(60)]
    assert "counted 1 failed" in judge(evidence(records, server_errors=1)).reasons[0].text


def test_answers_longer_than_asked_are_tolerated_in_one_percent() -> None:
    def with_long(count: int) -> list[dict[str, Any]]:
        return [record(i, metrics={"usage_completion_tokens": 400} if i < count else None) for i in range(200)]

    long_plan = plan(duration_s=200.0)
    assert codes(evidence(with_long(2), plan=long_plan)) == set()
    assert codes(evidence(with_long(3), plan=long_plan)) == {"long_answers"}


def test_server_without_usage_is_named_as_such() -> None:
    records = [record(i, metrics={"usage_completion_tokens": None}) for i in range(60)]
    assert codes(evidence(records)) == {"failed", "no_usage"}


def test_request_that_never_ended_is_found_although_no_record_holds_it() -> None:
    verdict = judge(evidence(log=LogFacts(sent=61, cancelled=1, window_began=True)))
    assert [reason.code for reason in verdict.reasons] == ["hung"]
    assert verdict.counts.lost == 1


def test_slow_answers_cut_off_by_the_grace_time_are_not_called_hung() -> None:
    slow = [record(i, metrics={"request_latency": 8000.0}, request_end_ns=_end(i, 8.0)) for i in range(60)]
    verdict = judge(evidence(slow, log=LogFacts(sent=61, cancelled=1, window_began=True)))
    assert (verdict.valid, verdict.counts.lost) == (True, 1)
    assert [warning.code for warning in verdict.warnings] == ["lost"]


def _end(index: int, seconds: float) -> int:
    start: int = record(index)["metadata"]["request_start_ns"]
    return start + round(seconds * 1e9)


def test_skipped_overflows_are_not_taken_for_lost_requests() -> None:
    log = LogFacts(sent=61, cancelled=0, window_began=True)
    assert judge(evidence(aggregate=dataclasses.replace(AGGREGATE, num_overflows=1), log=log)).counts.lost == 0


def test_overflows_over_one_percent_are_a_reason() -> None:
    assert codes(evidence(aggregate=dataclasses.replace(AGGREGATE, num_overflows=1))) == {"context_overflow"}


def test_clock_step_seen_by_us_is_a_reason() -> None:
    assert codes(evidence(clock_step_s=0.4)) == set()
    assert codes(evidence(clock_step_s=3600.0)) == {"clock_jump"}


def test_clock_step_is_found_in_records_alone() -> None:
    forwards = [record(i, request_end_ns=_end(i, 30.1)) if i == 20 else record(i) for i in range(60)]
    backwards = [record(i, request_end_ns=_end(i, -5.0)) if i == 20 else record(i) for i in range(60)]
    assert codes(evidence(forwards)) == {"clock_jump"}
    assert codes(evidence(backwards)) == {"clock_jump"}


def test_silent_end_of_the_window_is_too_little_coverage() -> None:
    verdict = judge(evidence(good_records(50)))
    assert [reason.code for reason in verdict.reasons] == ["coverage"]
    assert 0.80 < verdict.coverage < 0.83


def test_failed_warmup_of_any_stream_is_a_reason() -> None:
    bad = record(0, at_s=-5, warmup=True, agent_depth=1) | {"metrics": {}, "error": {"code": 500, "type": "x", "message": "no"}}
    assert codes(evidence([bad, *good_records()])) == {"warmup_failed"}


def test_wrong_tokenizer_shows_as_drift_of_long_prompts() -> None:
    def scaled(factor: float) -> list[dict[str, Any]]:
        made = good_records()
        for one in made:
            one["metrics"]["usage_prompt_tokens"]["value"] *= factor
        return made

    assert codes(evidence(scaled(1.01))) == set()
    assert codes(evidence(scaled(1.05))) == {"token_drift"}


def test_other_answering_model_is_a_reason() -> None:
    assert codes(evidence(answering_model="tiny")) == set()
    assert codes(evidence(answering_model="large")) == {"wrong_model"}


def test_warm_cache_under_a_cold_recipe_is_a_reason() -> None:
    warm = record(0, at_s=-5, warmup=True, metrics={"usage_prompt_cache_read_tokens": 1500})
    shared = record(0, at_s=-5, warmup=True, metrics={"usage_prompt_cache_read_tokens": 768})
    assert codes(evidence([warm, *good_records()])) == {"not_cold"}
    assert codes(evidence([warm, *good_records()], plan=plan(cache="asis"))) == set()
    assert codes(evidence([shared, *good_records()])) == set()


def test_silent_metrics_endpoint_is_a_reason_and_none_at_all_only_for_our_server() -> None:
    assert codes(evidence(counters=ServerCounters(2, 1))) == {"metrics_missing"}
    assert codes(evidence(counters=None, our_server=True)) == {"metrics_missing"}
    foreign = judge(evidence(counters=None))
    assert foreign.valid
    assert [warning.code for warning in foreign.warnings] == ["no_server_metrics"]


def test_hit_rates_more_than_a_point_apart_are_a_warning() -> None:
    assert judge(evidence(server_hit_share=0.009)).warnings == ()
    verdict = judge(evidence(server_hit_share=0.02))
    assert verdict.valid
    assert [warning.code for warning in verdict.warnings] == ["hit_rate_differs"]


def test_late_or_busy_load_generator_is_a_reason() -> None:
    assert codes(evidence(aggregate=dataclasses.replace(AGGREGATE, start_delay_p99_ms=51.0))) == {"client_slow"}
    assert codes(evidence(client_cpu=0.95)) == {"client_slow"}


def test_restart_in_the_middle_is_a_reason() -> None:
    assert codes(evidence(server_restarts=1)) == {"server_restarted"}


def test_run_without_a_single_request_is_not_valid() -> None:
    assert "no_requests" in codes(evidence([]))


def test_every_broken_rule_is_named() -> None:
    records = [failed(i) for i in range(60)]
    assert codes(evidence(records, exit_code=1, clock_step_s=9.0, aggregate=None)) >= {"harness_exit", "no_result", "clock_jump", "failed"}


def test_verdict_as_json_holds_codes_counts_and_marks() -> None:
    told = as_json(judge(evidence(clock_step_s=9.0)))
    assert told["valid"] is False
    assert told["reasons"] == [{"code": "clock_jump", "text": "the wall clock jumped by 9.0 s during the run"}]
    assert rows(good_records(1))[0].ok
