"""The process tree under kill, hang and stop: real processes around the scripted engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import launcher
from server.errors import DixError, PortInUse, ServerFailed, ServerUnreachable
from server.state import ProcessRecord, ServerState, clean_leftovers, host_boot_id, read_state, same_process, write_state
from tests.server.harness import NAME, FakeServer, alive, eventually, finish, group_pids, start_fake

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "max_tokens": 3000}


@pytest.fixture
def pair() -> Iterator[FakeServer]:
    server = start_fake(dp=2, hang_timeout_s=4.0)
    yield server
    finish(server)


def pid_of(state: ServerState, role: str, rank: int = -1) -> int:
    return next(record.pid for record in state.processes if record.role == role and record.rank == rank)


class OpenRequest:
    """One endless request in a thread; remembers how and when it ended."""

    def __init__(self, url: str, session: str, stream: bool) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.ended_s = 0.0
        self.error = ""
        self.thread = threading.Thread(target=self._run, args=(url, session, stream), daemon=True)
        self.thread.start()

    def _run(self, url: str, session: str, stream: bool) -> None:
        body = {**ASK, "stream": stream, "session_id": session}
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    self.lines.append(line)
        except httpx.HTTPError as error:
            self.error = repr(error)
        self.ended_s = time.monotonic()


def open_requests(server: FakeServer, count: int) -> list[OpenRequest]:
    server.script("again and again ", delay_s=0.05)
    requests = [OpenRequest(server.url, f"s{i}", stream=i % 2 == 0) for i in range(count)]
    # Nothing is claimed about these times, and a busy machine takes its own.
    eventually(lambda: server.metrics()["requests"]["active"] == count, 30)
    ranks = [rank["running"] for rank in eventually(lambda: server.metrics()["ranks"])]
    eventually(lambda: sum(rank["running"] for rank in server.metrics()["ranks"]) == count, 30)
    assert len(ranks) == 2
    return requests


def assert_all_failed(requests: list[OpenRequest], since_s: float, within_s: float) -> None:
    for request in requests:
        request.thread.join(within_s + 5)
        assert not request.thread.is_alive()
        assert request.ended_s - since_s < within_s
        if request.status == 200:
            assert "event: error" in request.lines
            assert "data: [DONE]" not in request.lines
            assert '"finish_reason":"stop"' not in "".join(request.lines)
            error = json.loads(request.lines[request.lines.index("event: error") + 1].removeprefix("data: "))["error"]
            assert error["code"] == "rank_failed"
        else:
            assert request.status == 503
            assert json.loads(request.lines[0])["error"]["code"] == "rank_failed"


def wait_ready(server: FakeServer, incarnation: int, timeout_s: float = 20.0) -> ServerState:
    def ready() -> ServerState | None:
        state = read_state(server.directory)
        return state if state and state.state == "ready" and state.incarnation >= incarnation else None

    state: ServerState = eventually(ready, timeout_s)
    return state


def test_killed_rank_fails_every_open_request_and_the_group_restarts(pair: FakeServer) -> None:
    requests = open_requests(pair, 6)
    before = pair.current()
    victim = pid_of(before, "rank", 1)
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    assert_all_failed(requests, killed_s, 3.0)
    assert httpx.get(f"{pair.url}/health").status_code == 503
    refused = httpx.post(f"{pair.url}/v1/chat/completions", json=ASK)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert pair.current().state == "restarting"
    assert str(victim) in pair.current().last_failure
    after = wait_ready(pair, 2)
    assert not set(group_pids(after)) & {pid_of(before, "rank", 0), victim}
    pair.script("fine")
    answer = httpx.post(f"{pair.url}/v1/chat/completions", json={"messages": ASK["messages"]}).json()
    assert answer["choices"][0]["message"]["reasoning_content"] == "fine"
    metrics = pair.metrics()
    assert metrics["watchdog"] == {"deaths_total": 1, "hangs_total": 0, "restarts_total": 1, "failed_requests_total": 6}
    assert metrics["requests"]["finished_total"]["error"] == 6
    assert metrics["totals"]["tokens"]["prompt_total"] > metrics["ranks"][0]["tokens"]["prompt_total"]


def test_hung_loop_is_noticed_by_its_heartbeat(pair: FakeServer) -> None:
    requests = open_requests(pair, 2)
    httpx.post(f"{pair.url}/deepinfer/debug/fault", json={"kind": "hang", "rank": 0})
    assert_all_failed(requests, time.monotonic(), 8.0)
    wait_ready(pair, 2)
    assert pair.metrics()["watchdog"]["hangs_total"] == 1
    dump = (pair.directory / "logs" / "supervisor.log").read_text()
    assert "step loop has not ticked" in dump


def test_a_loop_that_sleeps_is_not_given_the_time_of_the_longest_step() -> None:
    server = start_fake(dp=2)
    try:
        requests = open_requests(server, 2)
        httpx.post(f"{server.url}/deepinfer/debug/fault", json={"kind": "hang", "rank": 1})
        assert_all_failed(requests, time.monotonic(), 40.0)  # ten beats of a busy machine; a step may take 60 s
        wait_ready(server, 2)
        assert "rank 1 hangs: the step loop" in server.current().last_failure
        assert "computes nothing" in server.current().last_failure
    finally:
        finish(server)


def test_stop_ends_everything_and_a_second_start_works_at_once() -> None:
    server = start_fake(dp=2)
    try:
        state = server.current()
        port = state.port
        report = server.stop()
        assert report.killed == []
        assert report.seconds < 5
        assert not [pid for pid in (*group_pids(state), state.supervisor.pid) if alive(pid)]
        assert not (server.directory / "state.json").exists()
        assert not list((server.base / "run").iterdir())
        with pytest.raises(ServerUnreachable):
            server.stop()
    finally:
        finish(server)
    again = start_fake(dp=2, port=port)
    finish(again)


def test_helpers_in_a_rank_group_die_with_the_supervisor() -> None:
    server = start_fake()
    try:
        # The scripted engine starts a helper without a parent-death signal of its own, as compilers and loaders are.
        helper = int((server.directory / "helper.pid").read_text())
        assert alive(helper)
        os.kill(server.current().supervisor.pid, signal.SIGKILL)
        eventually(lambda: not alive(helper), 3.0)
    finally:
        finish(server)


@pytest.mark.e2e
def test_stop_waits_for_running_requests_within_the_grace() -> None:
    server = start_fake()
    try:
        server.script("one two three four five six seven", delay_s=0.3)
        result: list[httpx.Response] = []
        body = {"messages": ASK["messages"]}
        worker = threading.Thread(target=lambda: result.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)))
        worker.start()
        eventually(lambda: server.metrics()["requests"]["active"] == 1)
        stopper = threading.Thread(target=lambda: server.stop(10.0))
        stopper.start()
        eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert refused.json()["error"]["code"] == "draining"
        worker.join(10)
        stopper.join(10)
        assert result[0].json()["choices"][0]["finish_reason"] == "stop"
    finally:
        finish(server)


@pytest.mark.e2e
def test_stop_without_grace_fails_what_runs() -> None:
    server = start_fake(dp=2)
    try:
        requests = open_requests(server, 2)
        assert server.stop(0.0).seconds < 4
        for request in requests:
            request.thread.join(3)
            text = "".join(request.lines)
            assert "draining" in text, (request.status, text, request.error)
    finally:
        finish(server)


@pytest.mark.e2e
def test_failure_while_loading_is_reported_with_its_message(tmp_path: Path) -> None:
    server = start_fake()
    try:
        server.stop()
        server.directory.joinpath("fake.json").write_text('{"fail_load": true}')
        with pytest.raises(ServerFailed) as caught:
            restart(server)
        assert caught.value.exit_code == 4
        assert "scripted load failure" in str(caught.value)
        server.directory.joinpath("fake.json").write_text("{}")
        (server.base / "model" / "encoding" / "encoding.py").unlink()
        with pytest.raises(ServerFailed) as caught:
            restart(server)
        assert caught.value.exit_code == 2
        assert "encoding.py" in str(caught.value)
    finally:
        finish(server)


def restart(server: FakeServer, port: int = 0, name: str = NAME) -> ServerState:
    from engine.config import EngineConfig
    from hicache.config import HiCacheConfig
    from server.config import ServerConfig
    from server.plan import ServerPlan
    from tests.server.harness import FACTORY

    engine, config = EngineConfig(model=str(server.base / "model")), ServerConfig(port=port, ready_timeout_s=30)
    places = name, server.base, server.base / "run"
    return launcher.start(ServerPlan(engine, HiCacheConfig(size_gb=0), config, *places, engine_factory=FACTORY), server.events.append)


def test_taken_port_and_taken_name_are_refused_with_their_owner(fake: FakeServer) -> None:
    began_s = time.monotonic()
    with pytest.raises(DixError) as caught:
        restart(fake, port=fake.state.port, name="other")
    assert caught.value.exit_code == PortInUse.exit_code
    assert 'server "fake"' in str(caught.value)
    with pytest.raises(DixError, match="running already"):
        restart(fake)
    assert time.monotonic() - began_s < 4
    with socket.create_server(("127.0.0.1", 0)) as foreign, pytest.raises(DixError, match="another program"):
        restart(fake, port=foreign.getsockname()[1], name="other")


@pytest.mark.e2e
def test_policy_never_ends_the_server_with_status_4() -> None:
    server = start_fake(restart="never")
    try:
        state = server.current()
        os.kill(pid_of(state, "rank", 0), signal.SIGKILL)
        eventually(lambda: not alive(state.supervisor.pid), 10)
        events = [json.loads(line) for line in (server.directory / "events.jsonl").read_text().splitlines()]
        assert events[-1]["event"] == "error"
        assert events[-1]["exit_code"] == 4
        assert not [pid for pid in group_pids(state) if alive(pid)]
    finally:
        finish(server)


def test_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "30"])
    try:
        record = ProcessRecord("rank", other.pid, "1", other.pid, 0)
        assert not same_process(record, host_boot_id(), "boot")
        state = ServerState(
            name="x", boot_uuid="boot", host_boot_id=host_boot_id(), host="127.0.0.1", port=1, model="", served_name="x", state="ready",
            supervisor=record, processes=[record], runtime_dir=str(tmp_path / "none"),
        )  # fmt: skip
        write_state(tmp_path, state)
        assert clean_leftovers(tmp_path) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
