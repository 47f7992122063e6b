"""The run of the served model, tried at small sizes: what it measures, and that nothing is left of it when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]
SMALL = ("--device", "cpu", "--ranks", "2", "--layers", "1,2,20,21", "--stages", "1", "--set", "engine.enforce_eager=true")


def begin(out: Path, parts: str, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.gpu.whole_served", str(out), *SMALL, "--parts", parts, *more])


def servers(out: Path) -> list[int]:
    """Processes of servers whose home lies under `out`."""
    found = []
    for process in psutil.process_iter(["pid", "environ"]):
        if str(out) in (process.info["environ"] or {}).get("DIX_HOME", "") and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def test_every_rank_hits_its_cache_and_a_killed_one_costs_an_error_each(tmp_path: Path) -> None:
    assert begin(tmp_path, "warm-up,two turns,lost rank", "--accept", "2.8", "--budget", "500").wait(600) == 0
    found = json.loads((tmp_path / "served.json").read_text())
    assert list(found) == ["start", "warm-up", "two turns", "lost rank", "stop"]
    assert found["two turns"]["ranks_reached"] == 2
    assert found["two turns"]["least_cached_share"] > 0.9
    assert found["lost rank"]["all_told"] is True
    assert found["lost rank"]["ended"] == {"error": 4}
    assert found["lost rank"]["served_after"] == "whole"
    assert found["stop"]["left"] == 0
    assert servers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    run = begin(tmp_path, "warm-up")
    record = tmp_path / "served.json"
    while not record.exists():
        assert run.poll() is None
        time.sleep(0.05)
    os.kill(run.pid, number)
    run.wait(120)
    deadline = time.monotonic() + 60
    while servers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert servers(tmp_path) == []
