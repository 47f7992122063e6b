"""Running servers as an operator treats them: directories removed under them, limits, signals, frozen machines, impatient hands.

Real processes around the scripted engine; the slow ones use the embedded model or wait for clocks.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from server import launcher
from server.errors import ConfigError, ServerUnreachable
from server.restart_policy import PAUSES_S
from server.state import ServerState, read_state
from server.supervisor import Supervisor
from tests.e2e.terminal import Terminal
from tests.server.harness import FACTORY, NAME, ROOT, FakeServer, alive, eventually, finish, start_fake, write_model_dir

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    server = start_fake()
    yield server
    finish(server)


def answers(server: FakeServer) -> bool:
    return httpx.post(f"{server.url}/v1/chat/completions", json=ASK, timeout=20).status_code == 200


def kill_rank(server: FakeServer) -> ServerState:
    before = server.current()
    os.kill(next(record.pid for record in before.processes if record.role == "rank"), signal.SIGKILL)
    eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code != 200, 10)
    return before


def wait_ready(server: FakeServer) -> None:
    def again() -> bool:
        try:
            return httpx.get(f"{server.url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False  # the front may be replaced as well

    eventually(again, 60)


# ---- directories


def test_a_rank_comes_back_although_runtime_and_log_directories_were_removed(fake: FakeServer) -> None:
    """A logout removes XDG_RUNTIME_DIR, cleaners empty /tmp, people tidy up logs."""
    shutil.rmtree(fake.current().runtime_dir)
    logs = fake.directory / "logs"
    shutil.rmtree(logs)
    assert answers(fake)  # nothing needs the files while all processes live
    logs.write_text("in the way")
    before = kill_rank(fake)
    time.sleep(PAUSES_S[0] + 1.0)
    assert fake.current().state == "restarting"  # and not over: what cannot be made now is tried again
    logs.unlink()
    wait_ready(fake)
    assert answers(fake)
    after = fake.current()
    assert (after.port, after.incarnation, after.supervisor) == (before.port, before.incarnation + 1, before.supervisor)
    assert list((fake.directory / "logs").glob("rank-0.log"))


def test_a_full_disk_under_the_state_does_not_end_a_server_that_serves(fake: FakeServer) -> None:
    blocked = [fake.directory / "state.json.tmp", fake.directory / "launch.tmp"]
    for path in blocked:
        path.symlink_to("/dev/full")
    try:
        kill_rank(fake)
        wait_ready(fake)
        assert answers(fake)
        assert "cannot be written" in (fake.directory / "logs" / "supervisor.log").read_text()
    finally:
        for path in blocked:
            path.unlink()
    eventually(lambda: all(alive(record.pid) for record in fake.current().processes), 10)  # written as soon as there is room
    assert fake.current().state == "ready"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EPIPE])
def test_a_supervisor_whose_listener_is_gone_goes_on(number: int) -> None:
    """The terminal of `dix serve` was closed, the reader of its pipe left, the disk of the events is full."""

    def refuse(_event: dict[str, Any]) -> None:
        raise OSError(number, os.strerror(number))

    Supervisor._emit(SimpleNamespace(on_event=refuse, started_s=0.0), "ready")  # type: ignore[arg-type]


# ---- signals and hands


def test_a_hang_up_reaches_nobody(fake: FakeServer) -> None:
    state = fake.current()
    for record in [state.supervisor, *state.processes]:
        os.kill(record.pid, signal.SIGHUP)
    assert answers(fake)
    assert fake.current().processes == state.processes


def test_more_connections_than_open_files_are_waited_for_and_service_returns(fake: FakeServer) -> None:
    front = next(record.pid for record in fake.current().processes if record.role == "front")
    limits = resource.prlimit(front, resource.RLIMIT_NOFILE)
    used = len(list(Path(f"/proc/{front}/fd").iterdir()))
    resource.prlimit(front, resource.RLIMIT_NOFILE, (used + 4, limits[1]))
    crowd: list[socket.socket] = []
    try:
        crowd += [socket.create_connection(("127.0.0.1", fake.state.port)) for _ in range(40)]
        time.sleep(0.3)
        cpu_s = sum(psutil.Process(front).cpu_times()[:2])
        time.sleep(1.0)
        assert sum(psutil.Process(front).cpu_times()[:2]) - cpu_s < 0.7, "it spins"
    finally:
        for connection in crowd:
            connection.close()
    eventually(lambda: answers(fake), 20)
    resource.prlimit(front, resource.RLIMIT_NOFILE, limits)
    assert fake.current().processes[0].pid == front


@pytest.mark.e2e
def test_ipv6_two_stops_at_once_and_a_third(tmp_path: Path) -> None:
    try:
        server = start_fake(host="::1")
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        assert server.url.startswith("http://[::1]:")
        assert answers(server)
        failures: list[BaseException] = []

        def stop() -> None:
            try:
                server.stop()
            except ServerUnreachable:
                pass  # the other one was quicker
            except BaseException as error:
                failures.append(error)

        pids = [record.pid for record in [server.current().supervisor, *server.current().processes]]
        hands = [threading.Thread(target=stop) for _ in range(2)]
        for hand in hands:
            hand.start()
        for hand in hands:
            hand.join(60)
        assert failures == []
        assert not [pid for pid in pids if alive(pid)]
        with pytest.raises(ServerUnreachable, match="no server"):
            server.stop()
    finally:
        finish(server)


START = """
import sys
from pathlib import Path
from engine.config import EngineConfig
from hicache.config import HiCacheConfig
from server import launcher
from server.config import ServerConfig
from server.errors import ConfigError
from server.plan import ServerPlan
base = Path(sys.argv[1])
try:
    engine, config = EngineConfig(model=str(base / "model"), dp=2), ServerConfig(port=0, ready_timeout_s=60)
    plan = ServerPlan(engine, HiCacheConfig(size_gb=0), config, "fake", base, base / "run", engine_factory=sys.argv[2])
    launcher.start(plan, lambda event: print(event["event"], flush=True), owned="owned" in sys.argv)
except ConfigError as error:
    print("refused:", error, flush=True)
if "owned" in sys.argv:
    sys.stdin.read()
"""


@pytest.fixture
def base() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="dxo-", dir="/tmp"))
    write_model_dir(directory / "model")
    yield directory
    if (state := read_state(directory / "servers" / NAME)) is not None:
        launcher.stop(state.name, directory, 0.0)
    shutil.rmtree(directory)


def begin(base: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START, str(base), FACTORY, *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def processes_in(base: Path) -> list[int]:
    """Everything that was started for a server in `base`, by its command line or its inherited mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(base) in " ".join(process.cmdline()) and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_the_server_of_a_talk_ends_with_a_talk_that_is_killed(base: Path) -> None:
    process = begin(base, "owned")
    assert process.stdout is not None
    while "ready" not in process.stdout.readline().split():
        assert process.poll() is None
    assert read_state(base / "servers" / NAME) is not None
    process.kill()
    process.communicate()
    eventually(lambda: not processes_in(base), 30)
    assert read_state(base / "servers" / NAME) is None


@pytest.mark.slow
def test_of_two_starts_at_once_one_serves_and_one_says_so(base: Path) -> None:
    for _ in range(5):
        outputs = [process.communicate(timeout=120)[0] for process in [begin(base), begin(base)]]
        assert sorted("refused:" in output for output in outputs) == [False, True], outputs
        assert sorted("ready" in output.split() for output in outputs) == [False, True], outputs
        assert launcher.stop(NAME, base, 1.0).killed == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted_anywhere_leaves_nothing(base: Path, number: signal.Signals) -> None:
    """Ctrl-C ends what was started. SIGTERM to the command alone leaves a server that either serves or is gone."""
    draw, began_s = random.Random(int(number)), time.monotonic()
    begin(base).communicate(timeout=120)
    whole_s = time.monotonic() - began_s
    launcher.stop(NAME, base, 1.0)
    for _ in range(10):
        process = begin(base)
        time.sleep(draw.uniform(0.0, whole_s))
        process.send_signal(number)
        process.communicate(timeout=60)
        if process.returncode == 0:  # it was ready before the signal came
            launcher.stop(NAME, base, 1.0)
        elif number == signal.SIGTERM and (base / "servers" / NAME).exists():
            eventually(lambda: not processes_in(base) or ((state := read_state(base / "servers" / NAME)) and state.state == "ready"), 60)
            if processes_in(base):
                launcher.stop(NAME, base, 1.0)
        eventually(lambda: not processes_in(base), 15)
        assert not list((base / "run").glob("*")) if (base / "run").exists() else True
        assert read_state(base / "servers" / NAME) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_frozen_machine_goes_on_where_it_stood() -> None:
    """As `docker pause` and a suspended virtual machine do: every process stands still for longer than any heart-beat may."""
    server = start_fake(dp=2)
    try:
        state = server.current()
        pids = [record.pid for record in [*state.processes, state.supervisor]]
        for pid in reversed(pids):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(13)
        os.kill(state.supervisor.pid, signal.SIGCONT)  # the worst order: who judges runs first
        time.sleep(1.0)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(8)
        assert server.current().incarnation == state.incarnation
        assert answers(server)
    finally:
        finish(server)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_served_model_survives_the_terminal_it_was_started_from(tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp(prefix="dxo-", dir="/tmp"))
    env = {**os.environ, "DIX_HOME": str(home), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    dix = [sys.executable, "-m", "deepinfer_cli"]
    try:
        terminal = Terminal([*dix, "serve", "tiny", "--port", "0", "--name", "t"], env)
        seen = terminal.read_until("http://127.0.0.1:", 200)
        assert "ready" in seen or "port" in seen
        state = eventually(lambda: (s := read_state(home / "state/servers/t")) and s.state == "ready" and s, 120)
        os.close(terminal._fd)  # the other side of the terminal is gone: writes fail from now on
        os.kill(next(record.pid for record in state.processes if record.role == "rank"), signal.SIGKILL)
        eventually(lambda: (s := read_state(home / "state/servers/t")) and s.incarnation == 2 and s.state == "ready", 120)
        assert httpx.post(f"{state.base_url}/v1/chat/completions", json=ASK, timeout=60).status_code == 200
        done = subprocess.run([*dix, "stop", "--json"], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, json.loads(done.stdout)["servers"][0]["killed"]) == (0, [])
    finally:
        subprocess.run([*dix, "stop", "t", "--grace", "0s"], env=env, capture_output=True, check=False)
        shutil.rmtree(home, ignore_errors=True)
