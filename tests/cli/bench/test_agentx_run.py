"""A run from its first byte to its verdict, with a stand-in for the harness and a small server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from deepinfer_cli.api import Api
from deepinfer_cli.bench.agentx_collect import counters_at_start
from deepinfer_cli.bench.agentx_preflight import Preflight
from deepinfer_cli.bench.agentx_run import AgentxRun, command_for, errors_between, restarts
from deepinfer_cli.bench.aiperf_harness import Harness
from deepinfer_cli.bench.aiperf_process import ClockWatch, HarnessProcess
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation, Shared, prepare
from tests.cli.bench.agentx_fake_server import FakeServer
from tests.cli.bench.agentx_samples import plan

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "harness"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("agentx_fake_harness.py")} "$@"\n')
    path.chmod(0o755)
    return path


def call_in(home: Path, mode: str = "good") -> Invocation:
    environ = {**os.environ, "DIX_HOME": str(home), "FAKE_HARNESS": mode}
    return prepare(Shared(quiet=True), {}, {}, environ=environ)


def make_run(tmp_path: Path, program: Path, server: FakeServer, mode: str = "good") -> AgentxRun:
    found = Preflight(server.url, "tiny", ours=True, ranks=2)
    made = plan(url=server.url, duration_s=20.0, grace_s=5.0)
    return AgentxRun(call_in(tmp_path, mode), made, Harness("aiperf", "0.13.0", program), found, Api(server.url), {"build": "new"})


def body(run: AgentxRun) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run.folder / "run.json").read_text())
    return loaded


def test_whole_run_is_judged_by_its_records_although_the_harness_ends_with_0(tmp_path: Path, program: Path, server: FakeServer) -> None:
    run = make_run(tmp_path, program, server)
    assert body(run)["status"] == "running"
    verdict, code = run.execute()
    assert code == ExitCode.INVALID
    assert [reason.code for reason in verdict.reasons] == ["truncated"]
    told = body(run)
    assert (told["status"], told["valid"], told["harness_exit_code"]) == ("complete", False, 0)
    assert told["counts"] == {"ok": 70, "failed": 2, "truncated": 3, "cancelled": 0, "overflows": 0, "lost": 0}
    assert told["labels"] == {"build": "new"}
    assert "unofficial" in told["stamp"]


def test_run_directory_holds_the_untouched_output_and_one_table_of_requests(tmp_path: Path, program: Path, server: FakeServer) -> None:
    from tests.cli.bench.agentx_fake_harness import SAMPLE

    run = make_run(tmp_path, program, server)
    run.execute()
    for name in ("profile_export.jsonl", "profile_export_aiperf.json", "server_metrics_export.json"):
        assert (run.folder / "harness" / name).read_bytes() == (SAMPLE / name).read_bytes()
    requests = pd.read_parquet(run.folder / "requests.parquet")
    assert (len(requests), int(requests["ok"].sum())) == (75, 70)
    assert len(pd.read_parquet(run.folder / "warmup.parquet")) == 4
    assert set(pd.read_parquet(run.folder / "chunks.parquet")["request_id"]) == set(requests.loc[requests["ok"], "request_id"])
    assert "--unsafe-override" in (run.folder / "command.txt").read_text()
    assert not (run.folder / "scratch").exists()


def test_report_reads_the_run(tmp_path: Path, program: Path, server: FakeServer) -> None:
    from deepinfer_cli.report.stats import summarize

    run = make_run(tmp_path, program, server)
    run.execute()
    summary = summarize(run.folder)
    assert summary.value("requests", "ok") == 70
    assert round(summary.value("hit_rate_client") or 0, 3) == 0.796


def test_crashed_harness_leaves_a_readable_run_with_its_last_words(tmp_path: Path, program: Path, server: FakeServer) -> None:
    run = make_run(tmp_path, program, server, "crash")
    verdict, code = run.execute()
    assert code == ExitCode.INVALID
    assert {"harness_exit", "no_result", "no_requests"} <= {reason.code for reason in verdict.reasons}
    assert "tokenizer not loadable" in body(run)["reasons"][0]
    assert body(run)["status"] == "partial"


def _interrupt_when(ready: Callable[[], bool], times: int = 1, number: int = signal.SIGINT) -> threading.Thread:
    def work() -> None:
        for _ in range(times):
            while not ready():
                time.sleep(0.05)
            os.kill(os.getpid(), number)
            time.sleep(1.0)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_first_ctrl_c_keeps_the_partial_run_and_leaves_no_child(tmp_path: Path, program: Path, server: FakeServer) -> None:
    run = make_run(tmp_path, program, server, "wait")
    waiter = _interrupt_when(lambda: (run.harness_dir / "ready").exists())
    verdict, code = run.execute()
    waiter.join(5)
    assert code == ExitCode.INTERRUPTED
    assert "interrupted" in {reason.code for reason in verdict.reasons}
    assert body(run)["status"] == "partial"
    assert len(pd.read_parquet(run.folder / "requests.parquet")) == 36
    assert not alive(int((run.harness_dir / "helper.pid").read_text()))
    assert not (run.folder / "scratch").exists()


def test_second_ctrl_c_ends_a_stubborn_child_and_its_helpers(tmp_path: Path, program: Path, server: FakeServer) -> None:
    run = make_run(tmp_path, program, server, "stubborn")
    waiter = _interrupt_when(lambda: (run.harness_dir / "ready").exists(), times=2)
    began_s = time.monotonic()
    _, code = run.execute()
    waiter.join(5)
    assert time.monotonic() - began_s < 25
    assert code == ExitCode.INTERRUPTED
    assert not alive(int((run.harness_dir / "helper.pid").read_text()))
    assert len(pd.read_parquet(run.folder / "requests.parquet")) == 36


def test_sigterm_keeps_what_was_measured_and_has_its_own_exit_code(tmp_path: Path, program: Path, server: FakeServer) -> None:
    run = make_run(tmp_path, program, server, "wait")
    waiter = _interrupt_when(lambda: (run.harness_dir / "ready").exists(), number=signal.SIGTERM)
    _, code = run.execute()
    waiter.join(5)
    assert code == ExitCode.TERMINATED
    assert body(run)["status"] == "partial"
    assert not alive(int((run.harness_dir / "helper.pid").read_text()))


def test_harness_dies_with_us_when_we_are_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time, os\n"
        "from pathlib import Path\n"
        "from deepinfer_cli.bench.aiperf_process import HarnessProcess\n"
        f"log = Path({str(tmp_path / 'log')!r})\n"
        f"child = HarnessProcess([sys.executable, '-c', 'import time; time.sleep(60)'], os.environ, log, Path({str(tmp_path)!r}))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    deadline_s = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not alive(pid)


def test_cpu_time_covers_the_whole_group(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with HarnessProcess([sys.executable, "-c", code], os.environ, tmp_path / "log", tmp_path) as child:
        deadline_s = time.monotonic() + 10
        while len(child.cpu_seconds()) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert len(child.cpu_seconds()) >= 2
    assert child.cpu_seconds() == {}


def test_clock_watch_sees_a_step_and_ignores_slewing(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [1000.0]
    monkeypatch.setattr("deepinfer_cli.bench.aiperf_process.time.time", lambda: wall[0])
    monkeypatch.setattr("deepinfer_cli.bench.aiperf_process.time.monotonic", lambda: 5.0)
    watch = ClockWatch()
    for _ in range(100):
        wall[0] += 0.01
        watch.look()
    assert watch.step_s < 0.02
    wall[0] -= 60.0
    watch.look()
    assert watch.step_s == pytest.approx(60.0)


def test_restarts_and_errors_are_read_from_the_server_s_own_counters() -> None:
    before = {"boot_id": "a", "ranks": [{"rank": 0, "generation": 1}], "requests": {"finished_total": {"error": 2}}}
    after = {"boot_id": "a", "ranks": [{"rank": 0, "generation": 2}], "requests": {"finished_total": {"error": 5}}}
    assert (restarts(before, before), restarts(before, after), restarts(before, {**before, "boot_id": "b"}), restarts(None, after)) == (
        0,
        1,
        1,
        0,
    )
    assert (errors_between(before, after), errors_between(before, None)) == (3, None)


def sample(at_s: float, prompt_tokens: int) -> dict[str, Any]:
    return {"unix_s": at_s, "metrics": {"at": at_s, "ranks": [{"tokens": {"prompt_total": prompt_tokens}}]}}


def test_counters_at_the_window_s_start_hold_the_warmup_and_nothing_else() -> None:
    late = [sample(90.0, 500), sample(99.0, 900), sample(99.9, 1100), sample(100.4, 1500), sample(101.0, 1900), sample(130.0, 9000)]
    chosen = counters_at_start(late, 100.0, 1000)
    assert chosen is not None
    assert chosen["at"] == 100.4
    assert counters_at_start([], 100.0, 1000) is None
    only = counters_at_start([sample(50.0, 0)], 100.0, 1000)
    assert only is not None
    assert only["at"] == 50.0


def test_command_that_repeats_a_run_names_its_traces() -> None:
    assert "--traces " in command_for(plan())
    assert "--duration 60s --cache cold" in command_for(plan())
