"""Random processes of a server under load are killed or stopped: every request ends, service returns, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from engine.models.tiny import ensure_tiny
from hicache.config import HiCacheConfig
from server import launcher
from server.config import ServerConfig
from server.plan import ServerPlan
from server.state import ServerState, list_servers
from tests.server.harness import NAME, FakeServer, alive, eventually, finish, group_pids, start_fake
from tests.server.test_lifecycle import OpenRequest, open_requests, pid_of, wait_ready

KILLED_S = 3.0
STOPPED_S = 15.0  # the heartbeat's limit and the stacks that are dumped first
SEEDS = (0, 1, 2, 5, 7)  # these harm a guard twice, the front, and each rank once
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


def end_all(requests: list[OpenRequest], began_s: float, within_s: float, what: str) -> None:
    """Every request ended in time, and none of them looks like a success."""
    for request in requests:
        request.thread.join(within_s + 5)
        assert not request.thread.is_alive(), what
        assert request.ended_s - began_s < within_s, what
        assert "data: [DONE]" not in request.lines, what
        assert request.status != 200 or "event: error" in request.lines or request.error, (what, request.lines[-3:])


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def gone(state: ServerState, server: FakeServer) -> bool:
    """No process of an earlier state lives outside the present one."""
    return not [pid for pid in group_pids(state) if alive(pid) and pid not in group_pids(server.current())]


def harm_a_child(server: FakeServer, random_: random.Random, stop: bool) -> None:
    """Kill the front, a rank or a guard, or stop the front or a rank; the same port serves again, by itself."""
    requests = open_requests(server, 4)
    state = server.current()
    victim = random_.choice([record for record in state.processes if not stop or record.role != "guard"])
    what, began_s = f"{'stopped' if stop else 'killed'} {victim.label} {victim.pid}", time.monotonic()
    os.kill(victim.pid, signal.SIGSTOP if stop else signal.SIGKILL)
    end_all(requests, began_s, STOPPED_S if stop else KILLED_S, what)
    after = wait_ready(server, state.incarnation + 1, 60)
    assert after.port == state.port
    assert gone(state, server), what
    server.script("fine")
    assert httpx.post(f"{server.url}/v1/chat/completions", json=ASK, timeout=20).status_code == 200, what
    document = server.metrics()
    assert (document["requests"]["active"], document["requests"]["queued"], document["requests"]["streams_open"]) == (0, 0, 0)


def harm_the_supervisor(server: FakeServer) -> None:
    """Everything goes with it, and its name, port and directories are free for the next start."""
    requests = open_requests(server, 4)
    state, began_s = server.current(), time.monotonic()
    os.kill(state.supervisor.pid, signal.SIGKILL)
    end_all(requests, began_s, KILLED_S, "killed the supervisor")
    eventually(lambda: not [pid for pid in group_pids(state) if alive(pid)], 5.0)
    assert list_servers(server.base) == []
    with contextlib.suppress(launcher.ServerUnreachable):
        server.stop()
    assert not list((server.base / "run").iterdir())
    again = start_fake(dp=2, port=state.port)
    assert httpx.post(f"{again.url}/v1/chat/completions", json=ASK, timeout=20).status_code == 200
    finish(again)


def two_rounds(seed: int, stops: bool) -> None:
    """One server: a child is harmed, then the supervisor is killed."""
    random_ = random.Random(seed)
    server = start_fake(dp=2)
    try:
        open_before = descriptors(server.state.supervisor.pid)
        harm_a_child(server, random_, stop=stops and random_.random() < 0.3)
        assert descriptors(server.state.supervisor.pid) == open_before
        harm_the_supervisor(server)
    finally:
        finish(server)


@pytest.mark.e2e
def test_ten_rounds_of_chaos_always_end_in_service() -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda seed: two_rounds(seed, stops=False), SEEDS))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ninety_more_rounds_with_stopped_processes() -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: two_rounds(seed, stops=True), range(100, 145)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["front", "rank"])
def test_stopped_process_is_replaced(role: str) -> None:
    server = start_fake(dp=2)
    try:
        requests = open_requests(server, 4)
        began_s = time.monotonic()
        os.kill(pid_of(server.current(), role, -1 if role == "front" else 1), signal.SIGSTOP)
        end_all(requests, began_s, STOPPED_S, role)
        wait_ready(server, 2, 30)
        assert "hangs" in server.current().last_failure
    finally:
        finish(server)


@pytest.mark.slow
def test_stopped_supervisor_does_not_stop_the_service() -> None:
    server = start_fake()
    try:
        os.kill(server.state.supervisor.pid, signal.SIGSTOP)
        assert httpx.post(f"{server.url}/v1/chat/completions", json=ASK, timeout=20).status_code == 200
        os.kill(server.state.supervisor.pid, signal.SIGCONT)
        assert server.stop().killed == []
    finally:
        finish(server)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_embedded_model_comes_back_with_empty_queues_and_its_whole_cache(tmp_path: Path) -> None:
    """Three rounds on real engines: after each, no sequence, block or frame is held by a request that is gone."""
    base = Path(tempfile.mkdtemp(prefix="dxt-", dir="/tmp"))
    random_ = random.Random(1)
    engine = EngineConfig(model=str(ensure_tiny(tmp_path)), dp=2, yoco_mode="compact", yoco_keep_tokens=140)
    server_config = ServerConfig(port=0, ready_timeout_s=120)
    state = launcher.start(ServerPlan(engine, HiCacheConfig(), server_config, NAME, base, base / "run"), lambda _event: None)
    try:
        server = FakeServer(base, state, tokenizer=None, events=[])  # type: ignore[arg-type]
        capacity = [rank["kv"]["tokens_total"] for rank in server.metrics()["ranks"]]
        for _ in range(2):
            requests = [OpenRequest(server.url, f"s{i}", stream=i % 2 == 0) for i in range(4)]
            eventually(lambda: server.metrics()["requests"]["active"] == 4, 30)
            before = server.current()
            victim = random_.choice([record for record in before.processes if record.role == "rank"])
            began_s = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            end_all(requests, began_s, KILLED_S, victim.label)
            wait_ready(server, before.incarnation + 1, 90)
            assert httpx.post(f"{server.url}/v1/chat/completions", json=ASK, timeout=60).status_code == 200
            eventually(lambda: not any(rank["running"] + rank["waiting"] for rank in server.metrics()["ranks"]), 10)
            ranks = server.metrics()["ranks"]
            assert [rank["kv"]["tokens_total"] for rank in ranks] == capacity
            assert [rank["kv"]["tokens_used"] for rank in ranks] == [0, 0]
        assert launcher.stop(NAME, base, 2.0).killed == []
    finally:
        with contextlib.suppress(launcher.ServerUnreachable):
            launcher.stop(NAME, base, 0.0)
        shutil.rmtree(base, ignore_errors=True)
