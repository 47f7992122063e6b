"""A real server of the embedded model, driven only through the `dix` command and HTTP, as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest


@dataclass
class Dix:
    """The command line with a home of its own."""

    home: Path

    def __call__(self, *args: str, timeout_s: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "DIX_HOME": str(self.home), "OMP_NUM_THREADS": "1", **environment}
        return subprocess.run(
            [sys.executable, "-m", "deepinfer_cli", *args], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def ok(self, *args: str) -> str:
        done = self(*args)
        assert done.returncode == 0, f"dix {' '.join(args)} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *args: str) -> Any:
        return json.loads(self.ok(*args, "--json"))

    def state(self, name: str) -> Any:
        """The state file of a running server: pids, port, phase."""
        return json.loads(next(self.home.rglob(f"{name}/state.json")).read_text())

    def processes(self, name: str) -> list[psutil.Process]:
        """Supervisor, front, ranks and all that they started."""
        found: dict[int, psutil.Process] = {}
        state = self.state(name)
        for record in [state["supervisor"], *state["processes"]]:
            try:
                parent = psutil.Process(record["pid"])
                for process in [parent, *parent.children(recursive=True)]:
                    found[process.pid] = process
            except psutil.NoSuchProcess:
                continue
        return list(found.values())


@dataclass
class Server:
    """A running server: where it listens and how to reach it."""

    dix: Dix
    name: str
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def rank_pid(self, rank: int) -> int:
        return next(p["pid"] for p in self.dix.state(self.name)["processes"] if p["role"] == "rank" and p["rank"] == rank)

    def metrics(self) -> Any:
        return httpx.get(f"{self.url}/deepinfer/metrics", timeout=10).json()


def start(dix: Dix, name: str, *args: str) -> Server:
    dix.ok("start", "tiny", "--name", name, "--port", "0", *args)
    state = dix.state(name)
    return Server(dix, name, f"http://127.0.0.1:{state['port']}")


def wait_until(what: str, condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def dix(tmp_path_factory: pytest.TempPathFactory) -> Dix:
    return Dix(tmp_path_factory.mktemp("dix-home"))


@pytest.fixture(scope="module")
def server(dix: Dix) -> Iterator[Server]:
    """Two ranks with fault injection, shared by the tests of a module."""
    running = start(dix, "e2e", "--dp", "2", "--debug-faults")
    yield running
    dix("stop", "e2e", "--grace", "1s")
