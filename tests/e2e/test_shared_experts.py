"""Servers whose ranks share the experts: on one host, and on two hosts that torchrun starts (here both are this machine)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Dix, Server, alive, kill, start, wait_until
from tests.e2e.test_processes import open_stream

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
QUESTION = [{"role": "user", "content": "The code of Mira is 4711. What is the code of Mira?"}]


def answer(url: str) -> Any:
    body = {"messages": QUESTION, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def test_two_ranks_that_share_experts_answer_as_one_does(dix: Dix) -> None:
    alone = start(dix, "alone")
    expected = answer(alone.url)
    dix.ok("stop", "alone", "--grace", "1s")
    shared = start(dix, "shared", "--dp", "2", "--ep", "2")
    try:
        assert [answer(shared.url) for _ in range(4)] == [expected] * 4  # both ranks have had one
        figures = shared.metrics()
        assert len(figures["ranks"]) == 2
    finally:
        dix("stop", "shared", "--grace", "1s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_host(dix: Dix, number: int, port: int) -> subprocess.Popen[bytes]:
    """torchrun as a user calls it on each host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "deepinfer_cli"]
    command += ["serve", "tiny", "--name", "far", "--port", "0", "--dp", "2", "--ep", "2"]
    log = (dix.home / f"host-{number}.log").open("wb")
    return subprocess.Popen(command, env={**os.environ, "DIX_HOME": str(dix.home), "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def is_ready(dix: Dix, name: str) -> bool:
    if not any(dix.home.rglob(f"{name}/state.json")):
        return False
    return bool(dix.state(name)["state"] == "ready")


def test_two_hosts_are_one_server_that_no_host_leaves_silently(dix: Dix) -> None:
    port = free_port()
    hosts = [start_host(dix, number, port) for number in range(2)]
    try:
        for name in ("far", "far-host1"):
            wait_until(f"{name} is ready", lambda name=name: is_ready(dix, name), 240)
        servers = [Server(dix, name, f"http://127.0.0.1:{dix.state(name)['port']}") for name in ("far", "far-host1")]
        assert answer(servers[0].url) == answer(servers[1].url)

        lines: list[str] = []
        started = threading.Event()
        reader = threading.Thread(target=open_stream, args=(servers[0].url, lines, started))
        reader.start()
        assert started.wait(60)
        kill(servers[1].rank_pid(0))
        reader.join(15)
        assert not reader.is_alive()
        assert "event: error" in lines, lines[-3:]
        for server in servers:
            wait_until("both hosts are ready again", lambda url=server.url: httpx.get(f"{url}/health/ready").status_code == 200, 120)
        assert answer(servers[0].url) == answer(servers[1].url)
    finally:
        children = [
            process for name in ("far", "far-host1") if any(dix.home.rglob(f"{name}/state.json")) for process in dix.processes(name)
        ]
        for host in hosts:
            host.send_signal(signal.SIGTERM)
        for host in hosts:
            host.wait(60)
    wait_until("nothing of the server is left", lambda: not alive(children), 30)
