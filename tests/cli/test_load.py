"""The load generator and the run around it, against a server that is good, breaks, hangs, or stops short."""

from __future__ import annotations

import io
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from deepinfer_cli.bench.harness import judge
from deepinfer_cli.bench.load import Job, arrival_times, drive
from deepinfer_cli.bench.prompts import make_conversations
from deepinfer_cli.bench.recipe import Load, Recipe, parse_recipe
from deepinfer_cli.bench.runs import read_lines
from tests.cli.fake_server import FakeServer, serving

Dix = Callable[..., Any]


def recipe(**load: Any) -> Recipe:
    tables = {"load": {"conversations": 2, "turns": 2, "concurrency": 2, **load}, "prompt": {"first_tokens": 300, "turn_tokens": 120}}
    return parse_recipe({"name": "test", **tables, "output": {"tokens": 8}}, "test")


async def records_of(server: FakeServer, tmp_path: Path, work: Recipe | None = None, timeout_s: float = 20.0) -> list[dict[str, Any]]:
    work = work or recipe()
    conversations = make_conversations(work, lambda text: len(text.split()))
    job = Job(server.url, "fake", work, conversations, tmp_path / "records.jsonl", server.ours, timeout_s)
    await drive(job, io.StringIO())
    return read_lines(job.records)


async def test_good_answers_are_recorded_in_full(tmp_path: Path) -> None:
    with serving(rank_header=True) as server:
        records = await records_of(server, tmp_path)
    assert len(records) == 4
    for record in records:
        assert record["outcome"] == "ok"
        assert record["output_tokens"] == record["requested_tokens"] == record["chunks"] == 8
        assert len(record["gaps_s"]) == 7
        assert record["scheduled_s"] <= record["start_s"] < record["first_s"] < record["last_s"] < record["end_s"]
        assert record["rank"] == 0
        assert record["finish_reason"] == "length"
    later = [record for record in records if record["turn"] == 1]
    assert all(record["cached_tokens"] == 256 for record in later)


async def test_conversations_keep_their_session_and_history(tmp_path: Path) -> None:
    with serving() as server:
        await records_of(server, tmp_path)
        sent = server.requests
    assert len({body["session_id"] for body in sent}) == 2
    second = next(body for body in sent if len(body["messages"]) == 3)
    first = next(body for body in sent if body["messages"] == second["messages"][:1])
    assert first["session_id"] == second["session_id"]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("fault", "outcome", "text"),
    [
        ("error", "failed", "rank 0 died"),
        ("truncated", "truncated", "without a finish reason"),
        ("hang", "failed", "no byte for"),
        ("refuse", "failed", "HTTP 429: the queue is full"),
        ("short", "truncated", "4 of 8 tokens"),
        ("empty", "failed", "empty"),
    ],
)
async def test_every_bad_answer_is_a_failure(tmp_path: Path, fault: str, outcome: str, text: str) -> None:
    with serving(fault=fault) as server:
        records = await records_of(server, tmp_path, timeout_s=0.3)
    assert [record["outcome"] for record in records] == [outcome, outcome]  # and the second turns were never sent
    assert all(text in record["error_text"] for record in records)


async def test_a_refused_connection_is_a_failure(tmp_path: Path) -> None:
    with serving() as server:
        pass
    records = await records_of(server, tmp_path)
    assert {record["error_code"] for record in records} == {"connection"}


async def test_a_foreign_server_gets_only_the_common_fields(tmp_path: Path) -> None:
    with serving(ours=False) as server:
        records = await records_of(server, tmp_path)
        sent = server.requests
    assert all(record["outcome"] == "ok" for record in records)
    assert not {"session_id", "prefix_cache", "thinking", "ignore_eos"} & {key for body in sent for key in body}


async def test_closed_loop_never_exceeds_its_concurrency(tmp_path: Path) -> None:
    with serving() as server:
        records = await records_of(server, tmp_path, recipe(conversations=6, turns=1, concurrency=2))
    for record in records:
        at_once = sum(other["start_s"] < record["end_s"] and record["start_s"] < other["end_s"] for other in records)
        overlapping_at_start = sum(other["start_s"] <= record["start_s"] < other["end_s"] for other in records)
        assert overlapping_at_start <= 2
        assert at_once >= 1


async def test_open_loop_starts_on_time(tmp_path: Path) -> None:
    with serving() as server:
        records = await records_of(server, tmp_path, recipe(conversations=4, turns=1, arrival="constant", rate=20))
    assert sorted(round(record["scheduled_s"], 6) for record in records) == [0.0, 0.05, 0.1, 0.15]
    assert all(record["start_s"] >= record["scheduled_s"] for record in records)


def test_poisson_gaps_have_the_asked_rate_and_repeat() -> None:
    load = Load(arrival="poisson", rate=5.0)
    times = arrival_times(load, 4001, 1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.1)
    assert arrival_times(load, 10, 1) == times[:10]


@pytest.mark.parametrize(
    ("bad", "missing", "valid"), [(0, 0, True), (1, 0, True), (2, 0, False), (0, 1, True), (1, 1, False), (10, 0, False)]
)
def test_a_run_is_valid_up_to_ten_percent_of_failures(bad: int, missing: int, valid: bool) -> None:
    work = recipe(conversations=10, turns=1)
    raw = [{"outcome": "failed"}] * bad + [{"outcome": "ok"}] * (10 - bad - missing)
    verdict = judge(work, 0.10, raw, interrupted=False)
    assert verdict.valid is valid
    assert bool(verdict.reasons) is not valid
    assert verdict.status == ("partial" if missing else "complete")


def test_an_interrupted_run_is_partial_and_not_valid() -> None:
    verdict = judge(recipe(), 0.10, [{"outcome": "ok"}] * 4, interrupted=True)
    assert (verdict.status, verdict.valid, verdict.reasons) == ("partial", False, ["interrupted"])


def write_recipe(folder: Path) -> Path:
    path = folder / "quick.toml"
    load = "[load]\nconversations = 3\nturns = 2\nconcurrency = 2\n"
    path.write_text(
        f'name = "quick"\n{load}[prompt]\nfirst_tokens = 300\nturn_tokens = 120\n[output]\ntokens = 8\n[cache]\nstate = "cold"\n'
    )
    return path


def test_a_run_keeps_everything_a_number_needs(dix: Dix, tmp_path: Path, home: Path) -> None:
    with serving() as server:
        ran = dix("bench", "run", write_recipe(tmp_path), "--port", server.port, "--label", "build=new")
        assert server.resets == 1
    assert ran.code == 0, ran.err
    (folder,) = (home / "state" / "runs").iterdir()
    run = json.loads((folder / "run.json").read_text())
    assert (run["status"], run["valid"], run["labels"]) == ("complete", True, {"build": "new"})
    assert run["counts"] == {"planned": 6, "made": 6, "ok": 6}
    assert run["command"].startswith("dix bench run quick --url http://127.0.0.1:")
    for name in ("config.json", "environment.json", "requests.parquet", "chunks.parquet", "timeline.parquet", "progress.jsonl"):
        assert (folder / name).is_file(), name
    requests = pd.read_parquet(folder / "requests.parquet")
    assert len(requests) == 6
    assert requests["ok"].all()
    assert len(pd.read_parquet(folder / "timeline.parquet")) >= 1


def test_each_repeat_is_a_run_of_its_own(dix: Dix, tmp_path: Path, home: Path) -> None:
    with serving() as server:
        assert dix("bench", "run", write_recipe(tmp_path), "--port", server.port, "--repeats", 2, "-q").code == 0
    assert len(list((home / "state" / "runs").iterdir())) == 2


def test_a_failing_run_is_kept_and_exits_5(dix: Dix, tmp_path: Path, home: Path) -> None:
    with serving(fault="error", only_turn=1) as server:
        ran = dix("bench", "run", write_recipe(tmp_path), "--port", server.port)
    assert ran.code == 5
    (folder,) = (home / "state" / "runs").iterdir()
    run = json.loads((folder / "run.json").read_text())
    assert run["valid"] is False
    assert "3 of 6 requests failed" in run["reasons"][0]
    report = dix("report")
    assert report.code == 5
    assert "3 × failed: rank 0 died" in report.out


def test_progress_with_json_is_json_lines(dix: Dix, tmp_path: Path) -> None:
    with serving() as server:
        ran = dix("bench", "run", write_recipe(tmp_path), "--port", server.port, "--json")
    events = [json.loads(line) for line in ran.out.splitlines()]
    assert events[-1]["event"] == "run"
    assert {event["event"] for event in events[:-1]} == {"progress"}


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, home: Path) -> None:
    with serving(fault="hang", only_turn=1) as server:
        command = [sys.executable, "-m", "deepinfer_cli", "bench", "run", str(write_recipe(tmp_path)), "--port", str(server.port)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        deadline = time.monotonic() + 30
        while not any(body["messages"][-1]["role"] == "user" and len(body["messages"]) == 3 for body in server.requests):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
    assert child.returncode == 130, err
    (folder,) = (home / "state" / "runs").iterdir()
    run = json.loads((folder / "run.json").read_text())
    assert (run["status"], run["valid"], run["reasons"]) == ("partial", False, ["interrupted"])
    assert run["counts"]["ok"] >= 1
    assert run["counts"]["cancelled"] >= 1
    assert len(pd.read_parquet(folder / "requests.parquet")) == run["counts"]["made"]
