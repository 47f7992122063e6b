"""Heartbeats between processes: ages, limits, and no torn reads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from hicache.config import HiCacheConfig
from server.config import ServerConfig
from server.group import AWAKE_PATIENCE_S, FROZEN_S, ProcessGroup
from server.heartbeat import PROCESS_DEAD_S, HeartbeatFile
from server.launch import Launch
from server.processes import Child
from server.state import wants_to_run

SPIN, SLEEP = "print(flush=True)\nwhile True: pass", "import time\nprint(flush=True)\ntime.sleep(600)"


def tick_forever(path: Path) -> None:
    file = HeartbeatFile(path)
    while True:
        file.announce(0, 60.0)
        file.tick_process(0)


def test_a_reader_never_sees_a_stamp_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "beats"
    reader = HeartbeatFile(path, slots=1)
    reader.reset(0, 60.0)
    writer = multiprocessing.get_context("spawn").Process(target=tick_forever, args=(path,), daemon=True)
    writer.start()
    try:
        while reader.read(0).count == 0:
            assert writer.is_alive()
            time.sleep(0.01)
        complaints = {reader.read(0).complaint for _ in range(100_000)}
    finally:
        writer.kill()
        writer.join()
    assert complaints == {""}


def test_slots_do_not_touch_each_other(tmp_path: Path) -> None:
    file = HeartbeatFile(tmp_path / "beats", slots=3)
    for rank in range(3):
        file.reset(rank, 10.0 * (rank + 1))
    file.tick_loop(1)
    assert [file.read(rank).count for rank in range(3)] == [0, 1, 0]
    assert [file.read(rank).limit_s for rank in range(3)] == [10.0, 20.0, 30.0]


@pytest.mark.parametrize(("advance_s", "limit_s", "words"), [(PROCESS_DEAD_S + 1, 1e9, "process"), (5.0, 4.0, "step loop"), (5.0, 6.0, "")])
def test_stale_stamps_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advance_s: float, limit_s: float, words: str) -> None:
    file = HeartbeatFile(tmp_path / "beats", slots=1)
    file.reset(0, limit_s)
    now = time.monotonic()
    monkeypatch.setattr("server.heartbeat.time.monotonic", lambda: now + advance_s)
    complaint = file.read(0).complaint
    assert words in complaint
    assert bool(complaint) == bool(words)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[[str], ProcessGroup]]:
    """A group of one child that runs the given code, as the supervisor sees it; its process stamp is older than allowed."""
    launch = Launch("n", "0123456789", EngineConfig(model="m", device="cpu"), HiCacheConfig(), ServerConfig(), str(tmp_path), str(tmp_path))
    launch.boot_dir.mkdir()
    children = []

    def make(code: str) -> ProcessGroup:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        children.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        while wants_to_run(process.pid) == (code == SLEEP):
            time.sleep(0.01)
        group = ProcessGroup(launch, tmp_path / "launch.json", socket.socket(), [])
        group.ranks.append(Child("rank", 0, process, process, ""))
        group.heartbeats.reset(0, 3 * PROCESS_DEAD_S, start_s=-PROCESS_DEAD_S - 1)
        return group

    yield make
    for process in children:
        process.kill()
        process.wait()


def test_a_silent_process_that_waits_is_hung(watched: Callable[[str], ProcessGroup]) -> None:
    failure = watched(SLEEP)._hang()
    assert failure is not None
    assert "the process has not run" in failure.message


def test_a_silent_process_that_only_lacks_a_processor_is_not_hung_before_its_loop_is(
    watched: Callable[[str], ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = watched(SPIN)
    assert group._hang() is None
    late_s = time.monotonic() + 3 * PROCESS_DEAD_S + 1
    monkeypatch.setattr("server.heartbeat.time.monotonic", lambda: late_s)
    group._looked_s = late_s
    failure = group._hang()
    assert failure is not None
    assert "step loop" in failure.message


def test_a_stopped_process_is_hung_although_it_would_compute(watched: Callable[[str], ProcessGroup]) -> None:
    group = watched(SPIN)
    os.kill(group.ranks[0].pid, signal.SIGSTOP)
    os.waitid(os.P_PID, group.ranks[0].pid, os.WSTOPPED | os.WNOWAIT)
    assert group._hang() is not None


def test_after_the_supervisor_itself_stood_still_the_others_get_time_to_beat(
    watched: Callable[[str], ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen container, a suspended machine: every stamp is old when they go on, and the supervisor may be the first to run."""
    group = watched(SLEEP)
    group._looked_s -= FROZEN_S + 1
    assert group._hang() is None
    now_s = time.monotonic() + AWAKE_PATIENCE_S + 1
    group._looked_s = now_s
    monkeypatch.setattr("server.group.time.monotonic", lambda: now_s)
    assert group._hang() is not None
