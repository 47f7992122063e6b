"""Ranks of a script end together, so that a failed one costs no GPU time."""

import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from tests.gpu.ranks import run_together

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_codes_come_in_order_of_rank() -> None:
    assert run_together([[sys.executable, "-c", "pass"], [sys.executable, "-c", "pass"]]) == [0, 0]


def test_the_failure_of_one_ends_the_others() -> None:
    assert run_together([SLEEP, [sys.executable, "-c", "raise SystemExit(3)"]]) == [-signal.SIGKILL, 3]


def test_each_rank_sees_its_gpu_and_no_multicast() -> None:
    code = "import os; raise SystemExit(10 * int(os.environ['CUDA_VISIBLE_DEVICES']) + int(os.environ['NCCL_NVLS_ENABLE']))"
    assert run_together([[sys.executable, "-c", code]] * 2, own_gpus=True)[0] == 0


def test_a_script_that_is_told_to_end_leaves_no_rank() -> None:
    script = f"from tests.gpu.ranks import run_together\nprint(flush=True)\nrun_together([{SLEEP!r}] * 2)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    me = psutil.Process(parent.pid)
    while len(children := me.children()) < 2:
        assert parent.poll() is None
    os.kill(parent.pid, signal.SIGTERM)
    assert parent.wait(60) == 128 + signal.SIGTERM
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_a_signal_while_a_rank_is_started_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(SystemExit) as ended:
        run_together([SLEEP] * 2)
    alive = [rank for rank in started if rank.poll() is None]
    for rank in alive:
        rank.kill()
    assert ended.value.code == 128 + signal.SIGTERM
    assert not alive
