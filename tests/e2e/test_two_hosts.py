"""Two hosts as two network namespaces with a cable between them: one server of 2 x 2 ranks, and neither host is lost in silence.

Needs the right to make network namespaces; skipped, with the reason, where it is missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT, RENDEZVOUS = 8917, 29_617
LOST_S = 30.0  # heart-beats miss a silent host after 10 s; the rest is a loaded machine


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass
class Host:
    """A namespace with its end of the cable, and the torchrun agent in it."""

    number: int
    home: Path
    agent: subprocess.Popen[bytes] | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"dixhost{self.number}"

    @property
    def cable(self) -> str:
        return f"dixveth{self.number}"

    def inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def switch(self, state: str) -> None:
        """Pull the cable (down) or plug it in (up)."""
        ip("-n", self.name, "link", "set", self.cable, state)

    def start(self) -> None:
        launch = ["torch.distributed.run", "--nnodes", "2", "--node-rank", str(self.number), "--nproc-per-node", "1"]
        launch += ["--master-addr", ADDRESSES[0], "--master-port", str(RENDEZVOUS), "-m", "deepinfer_cli"]
        launch += ["serve", "tiny", "--name", "two", "--port", str(PORT), "--dp", "4", "--ep", "4"]
        environment = {**os.environ, "DIX_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        log = (self.home / "agent.log").open("ab")
        self.agent = subprocess.Popen(self.inside(sys.executable, "-m", *launch), env=environment, stdout=log, stderr=log)

    def processes(self) -> list[psutil.Process]:
        assert self.agent is not None
        try:
            agent = psutil.Process(self.agent.pid)
            return [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def power_off(self) -> None:
        for process in self.processes():
            process.kill()
        if self.agent is not None:
            self.agent.wait(30)

    def shut_down(self) -> None:
        if self.agent is None or self.agent.poll() is not None:
            return
        self.agent.send_signal(signal.SIGTERM)
        try:
            self.agent.wait(60)
        except subprocess.TimeoutExpired:
            self.power_off()

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout_s: int = 90) -> tuple[int, str]:
        """(status, body) of a request from inside the namespace; status 0 when nobody answers."""
        command = ["curl", "-s", "-m", str(timeout_s), "-w", "\n%{http_code}", f"http://127.0.0.1:{PORT}{path}"]
        if body is not None:
            command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=timeout_s + 30, check=False)
        text, _, status = done.stdout.rpartition("\n")
        return int(status or 0), text

    @property
    def ready(self) -> bool:
        return self.ask("/health/ready", timeout_s=5)[0] == 200

    def answer(self) -> str:
        status, text = self.ask("/v1/completions", {"prompt": list(range(40, 200)), "max_tokens": 8, "temperature": 0, "ignore_eos": True})
        assert status == 200, text
        choice: str = json.loads(text)["choices"][0]["text"]
        return choice

    def stream(self) -> threading.Thread:
        """A long stream in a thread; `lines` holds what came."""
        body = {"prompt": [50, 51, 52], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        command = ["curl", "-sN", "-m", "300", f"http://127.0.0.1:{PORT}/v1/completions", "-H", "content-type: application/json"]
        self.lines = []

        def read() -> None:
            with subprocess.Popen(self.inside(*command, "-d", json.dumps(body)), stdout=subprocess.PIPE, text=True) as curl:
                assert curl.stdout is not None
                for line in curl.stdout:
                    self.lines.append(line.strip())

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    both = [Host(number, tmp_path / f"host{number}") for number in range(2)]
    made: list[str] = []
    try:
        for host in both:
            host.home.mkdir()
            ip("netns", "add", host.name)
            made.append(host.name)
            ip("-n", host.name, "link", "set", "lo", "up")
        ip("link", "add", both[0].cable, "netns", both[0].name, "type", "veth", "peer", "name", both[1].cable, "netns", both[1].name)
        for host, address in zip(both, ADDRESSES, strict=True):
            ip("-n", host.name, "addr", "add", f"{address}/24", "dev", host.cable)
            host.switch("up")
    except (PermissionError, FileNotFoundError) as error:
        for name in made:
            ip("netns", "del", name)
        pytest.skip(f"no right to make network namespaces: {error}")
    try:
        yield both
    finally:
        for host in both:
            host.shut_down()
        for host in both:
            ip("netns", "del", host.name)


def start_both(hosts: list[Host]) -> None:
    for host in hosts:
        host.start()
    wait_ready(hosts)


def wait_ready(hosts: list[Host], timeout_s: float = 400) -> None:
    for host in hosts:
        wait_until(f"host {host.number} is ready\n{tail(host)}", lambda host=host: host.ready, timeout_s)  # type: ignore[misc]


def tail(host: Host) -> str:
    log = host.home / "agent.log"
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def assert_streams_fail(hosts: list[Host], threads: list[threading.Thread], since_s: float) -> None:
    for host, thread in zip(hosts, threads, strict=True):
        thread.join(max(1.0, since_s + LOST_S - time.monotonic()))
        assert not thread.is_alive(), f"the stream on host {host.number} still waits"
        assert "event: error" in host.lines, host.lines[-3:]
        assert "data: [DONE]" not in host.lines


def running_streams(hosts: list[Host]) -> list[threading.Thread]:
    threads = [host.stream() for host in hosts]
    for host in hosts:
        wait_until("tokens flow", lambda host=host: sum(line.startswith("data:") for line in host.lines) > 3, 90)  # type: ignore[misc]
    return threads


def test_two_hosts_serve_as_one_and_a_pulled_cable_ends_every_open_request(hosts: list[Host]) -> None:
    start_both(hosts)
    expected = hosts[0].answer()
    assert hosts[1].answer() == expected
    threads = running_streams(hosts)
    pulled_s = time.monotonic()
    hosts[1].switch("down")
    assert_streams_fail(hosts, threads, pulled_s)
    hosts[1].switch("up")
    wait_ready(hosts)
    assert [host.answer() for host in hosts] == [expected] * 2


def test_a_host_without_power_ends_the_requests_of_the_other_and_both_can_start_again(hosts: list[Host]) -> None:
    start_both(hosts)
    expected = hosts[0].answer()
    threads = running_streams(hosts)
    lost_s = time.monotonic()
    hosts[1].power_off()
    assert_streams_fail(hosts[:1], threads[:1], lost_s)
    hosts[0].shut_down()
    start_both(hosts)
    assert [host.answer() for host in hosts] == [expected] * 2
