"""dix as somebody operates it: full disks, closed terminals, two starts at once, clocks that jump, directories that vanish.

Each test is one attempt of the table in docs/robustness.md; the longer ones with real servers are in test_operator_servers.py.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepinfer_cli.app import end_in_order
from deepinfer_cli.bench.runs import list_runs, new_run
from deepinfer_cli.commands.chat import own_server
from deepinfer_cli.commands.logs import read_new
from deepinfer_cli.commands.status import _up_s
from deepinfer_cli.invocation import Shared, prepare
from deepinfer_cli.narrator import Narrator
from deepinfer_cli.outputs import write_json
from deepinfer_cli.paths import paths_from
from deepinfer_cli.servers import find_url
from engine.config import EngineConfig
from hicache.config import HiCacheConfig
from hicache.errors import REMEDIES, machine_error
from server import background, launcher
from server.config import ServerConfig
from server.errors import ConfigError, MachineError, ServerUnreachable
from server.launch import MAX_SOCKET_PATH, Launch, load_launch, recorded_grace_s
from server.logs import LogFile
from server.plan import ServerPlan
from server.start_checks import check_memory
from server.state import ServerState, clean_leftovers, host_boot_id, list_servers, read_state, record_self, server_dir, write_state
from tests.cli.fake_server import serving
from tests.e2e.terminal import Terminal
from tests.server.harness import ROOT

DIX = [sys.executable, "-m", "deepinfer_cli"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A home of its own and nothing that changes what is printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DIX_", "NO_COLOR", "FORCE_COLOR", "TERM"))}
    return {**kept, "DIX_HOME": str(tmp_path / "home")}


def running_state(**changes: Any) -> ServerState:
    """A server whose supervisor is this process."""
    fields = {"name": "s", "boot_uuid": "0123456789", "host_boot_id": host_boot_id(), "host": "127.0.0.1", "port": 1, "model": ""}
    return ServerState(**{**fields, "served_name": "s", "state": "ready", "supervisor": record_self("supervisor"), **changes})


def make_launch(directory: Path, runtime_dir: Path | None = None, name: str = "s") -> Launch:
    engine = EngineConfig(model="m", device="cpu")
    return ServerPlan(engine, HiCacheConfig(), ServerConfig(), name, directory, runtime_dir or directory / "run").launch()


# ---- terminals and streams


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_any_standard_stream_may_be_closed(env: dict[str, str], closed: str) -> None:
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *DIX, "status"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_that_cannot_be_written_is_exit_code_3_and_one_line(env: dict[str, str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        environment = {**env, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run([*DIX, "status", "--json"], env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.splitlines()[0].endswith("No space left on device")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("extra", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"TMPDIR": "/nonexistent"}])
def test_poor_environments_change_no_answer_and_print_no_control_sequence(env: dict[str, str], extra: dict[str, str]) -> None:
    done = subprocess.run([*DIX, "status"], env={**env, **extra}, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"nothing is running\n")
    assert b"\x1b" not in done.stderr


# ---- what the machine refuses


@pytest.mark.parametrize("number", sorted(REMEDIES))
def test_what_the_system_refuses_is_a_machine_error_with_the_file_and_a_remedy(number: int) -> None:
    failure = machine_error(OSError(number, os.strerror(number), "/some/file"))
    assert failure is not None
    assert failure.exit_code == 3
    assert str(failure) == f"/some/file: {os.strerror(number)}"
    assert failure.hint
    assert machine_error(ValueError()) is None
    assert machine_error(OSError(errno.EBADF, "ours")) is None


def test_more_ranks_than_the_memory_can_hold_are_refused_before_any_starts() -> None:
    """A slip in --dp started a thousand processes of a few hundred megabytes each."""
    with pytest.raises(MachineError, match=r"engine\.dp is 1,000") as caught:
        check_memory(1000, 20 * 2**30)
    assert caught.value.hint == "--dp 80 or less"
    check_memory(8, 20 * 2**30)
    check_memory(1, 2**20)  # one rank is what the system decides about


@pytest.mark.parametrize("name", ["x" * 300, "模" * 100])
def test_a_name_that_no_directory_can_have_is_refused_with_its_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="takes 300 bytes") as caught:
        make_launch(tmp_path, name=name)
    assert caught.value.hint == "--name of at most 200"
    assert "…" in str(caught.value)


@pytest.mark.parametrize("failed", [False, True])
def test_a_talk_leaves_no_directory_unless_its_server_failed(tmp_path: Path, failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is wanted then; ten thousand talks are not ten thousand directories."""
    logs = server_dir(tmp_path / "state", f"chat-{os.getpid()}") / "logs"
    stopped: list[str] = []
    monkeypatch.setattr(launcher, "start", lambda *_, **__: logs.mkdir(parents=True) or running_state())
    monkeypatch.setattr(launcher, "stop", lambda name, *_: stopped.append(name))
    call = prepare(Shared(quiet=True), {}, {}, {"DIX_HOME": str(tmp_path)})
    expected = pytest.raises(ServerUnreachable) if failed else nullcontext()
    with expected, own_server(call, "tiny") as url:
        assert url.startswith("http://")
        if failed:
            raise ServerUnreachable("it broke")
    assert stopped == [f"chat-{os.getpid()}"]
    assert logs.exists() == failed


def test_too_little_memory_is_a_machine_error_whoever_notices() -> None:
    torch_says = RuntimeError("alloc_cpu.cpp:127 DefaultCPUAllocator: can't allocate memory: you tried to allocate 134 bytes.")
    assert str(machine_error(MemoryError())) == "not enough memory"
    assert str(machine_error(torch_says)) == "not enough memory: tried to allocate 134 bytes"
    assert str(machine_error(ImportError("libtorch_cpu.so: failed to map segment from shared object"))) == "not enough memory"


@pytest.mark.slow
@pytest.mark.parametrize("kib", [500_000, 900_000])
def test_a_limit_on_memory_ends_a_start_with_exit_code_3_and_nothing_left(kib: int) -> None:
    home = Path(tempfile.mkdtemp(prefix="dxo-", dir="/tmp"))
    limited = {**os.environ, "DIX_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = ["sh", "-c", f'ulimit -v {kib}; exec "$@"', "sh", *DIX, "start", "tiny", "--port", "0"]
    try:
        done = subprocess.run(command, env=limited, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 3, done.stderr
        assert "memory" in done.stderr
        assert list_servers(home / "state") == []
    finally:
        shutil.rmtree(home, ignore_errors=True)


def test_a_restart_is_a_warning_and_the_tail_of_a_log_is_for_those_who_ask(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call = prepare(Shared(), {}, {}, {"DIX_HOME": str(tmp_path)})
    narrator = Narrator(call, 1)
    narrator({"event": "failure", "message": "rank 0 was killed", "restarting": True})
    narrator({"event": "log_tail", "lines": ["a long traceback"]})
    assert capsys.readouterr().err == "warning: rank 0 was killed; starting again\n"


def test_a_home_that_is_a_file_is_exit_code_3(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run([*DIX, "start"], env={**env, "DIX_HOME": str(tmp_path / "file")}, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert str(tmp_path / "file") in done.stderr.splitlines()[0]


def test_a_limit_on_the_size_of_files_is_named(env: dict[str, str]) -> None:
    done = subprocess.run(["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *DIX, "start"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "File too large" in done.stderr.splitlines()[0]


def test_a_run_directory_on_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many file systems take what is written and find out only later that it has no room."""

    def refuse(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = new_run(tmp_path, "smoke")
    write_json(run / "run.json", {"status": "running"})
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space left"):
            write_json(run / "run.json", {"status": "finished"})
    assert [path.name for path in run.iterdir()] == ["run.json"]
    assert json.loads((run / "run.json").read_text()) == {"status": "running"}
    write_json(run / "run.json", {"status": "finished"})
    assert [body["status"] for body in list_runs(tmp_path)] == ["finished"]


# ---- paths


@pytest.mark.parametrize("name", ["x" * 110, "ü" * 60, "運" * 40])
def test_a_socket_path_is_measured_in_bytes_and_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    launch = make_launch(tmp_path, Path("/tmp") / name)
    with pytest.raises(ConfigError, match=f"bytes of {MAX_SOCKET_PATH}") as caught:
        launch.prepare()
    assert "DIX_HOME" in caught.value.hint
    assert not launch.boot_dir.exists()


def test_spaces_unicode_and_symbolic_links_in_the_home_are_only_names(tmp_path: Path) -> None:
    real = Path("/tmp") / f"dx ü{os.getpid()}"
    home = tmp_path / "link"
    home.symlink_to(real)
    real.mkdir()
    try:
        paths = paths_from({"DIX_HOME": str(home)})
        launch = make_launch(paths.state, Path(real) / "run", "a b/ü")
        launch.prepare()
        socket.socket(socket.AF_UNIX).bind(str(launch.socket_path))
        assert load_launch(Path(launch.server_dir) / "launch.json") == launch
        assert Path(launch.server_dir).parent == paths.state / "servers"
    finally:
        subprocess.run(["rm", "-rf", str(real)], check=True)


# ---- state files


def test_leftovers_of_a_state_file_that_names_another_directory_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty path is the working directory, and a damaged one may be any."""
    precious = tmp_path / "work"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    monkeypatch.chdir(precious)
    for runtime_dir in ("", str(precious), "."):
        write_state(tmp_path, running_state(runtime_dir=runtime_dir))
        clean_leftovers(tmp_path)
        assert (precious / "thesis.tex").read_text() == "years"
    ours = tmp_path / "01234567"
    ours.mkdir()
    (ours / "ranks").write_text("")
    write_state(tmp_path, running_state(runtime_dir=str(ours)))
    clean_leftovers(tmp_path)
    assert not ours.exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": 3}', b'{"version": 99}', b"\xff\xfe", None])
def test_a_damaged_state_file_is_no_server(tmp_path: Path, content: bytes | None) -> None:
    directory = server_dir(tmp_path, "s")
    directory.mkdir(parents=True)
    if content is None:
        (directory / "state.json").mkdir()
    else:
        (directory / "state.json").write_bytes(content)
    assert list_servers(tmp_path) == []
    assert read_state(directory) is None
    with pytest.raises(ServerUnreachable):
        launcher.stop("s", tmp_path)


def test_a_state_file_of_another_boot_of_the_machine_is_no_server(tmp_path: Path) -> None:
    directory = server_dir(tmp_path, "s")
    directory.mkdir(parents=True)
    write_state(directory, running_state(host_boot_id="another"))
    assert list_servers(tmp_path) == []


def test_ten_thousand_files_that_are_not_ours_in_state_and_runs_change_nothing(tmp_path: Path) -> None:
    directory = server_dir(tmp_path, "s")
    directory.mkdir(parents=True)
    write_state(directory, running_state())
    (tmp_path / "runs").mkdir()
    for number in range(5000):
        (directory.parent / f"litter-{number}").write_text("")
        (tmp_path / "runs" / f"20260101-000000-litter-{number:06x}").write_text("")
    write_json(new_run(tmp_path / "runs", "smoke") / "run.json", {"recipe": "smoke"})
    assert [state.name for state in list_servers(tmp_path)] == ["s"]
    assert [run["recipe"] for run in list_runs(tmp_path / "runs")] == ["smoke"]


# ---- two at once


def test_a_start_that_comes_second_touches_nothing_of_the_first(tmp_path: Path) -> None:
    """The first one's supervisor may not have written its state yet."""
    plan = ServerPlan(EngineConfig(model="m", device="cpu"), HiCacheConfig(), ServerConfig(), "s", tmp_path, tmp_path / "run")
    launch = plan.launch()
    lock = launcher.take_lock(launch)
    events = Path(launch.server_dir) / background.EVENTS_NAME
    events.write_text('{"event": "bound"}\n')
    before = sorted(path.name for path in events.parent.iterdir())
    with pytest.raises(ConfigError, match="running already"):
        launcher.start(plan, print)
    with pytest.raises(ConfigError, match="running already"):
        launcher.serve(plan, print)
    assert sorted(path.name for path in events.parent.iterdir()) == before
    assert events.read_text() == '{"event": "bound"}\n'
    lock.release()
    launcher.take_lock(launch).release()


def test_an_interrupt_in_the_middle_of_a_spawn_waits_for_its_end() -> None:
    """Out of the middle of a fork it would leave a child that nobody knows."""
    steps = []

    def spawn() -> None:
        with background.interrupts_later():
            signal.raise_signal(signal.SIGINT)
            steps.append("spawned")

    with pytest.raises(KeyboardInterrupt):
        spawn()
    assert steps == ["spawned"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


HUNG_UP = """
import signal, sys, time
from pathlib import Path
from deepinfer_cli.app import end_in_order
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
end_in_order()
try:
    print("begun", flush=True)
    time.sleep(60)
finally:
    print("said to nobody", flush=True)
    time.sleep(0.5)
    Path(sys.argv[1]).write_text("in order")
"""


def test_a_terminal_that_closes_lets_a_command_put_things_in_order(tmp_path: Path, env: dict[str, str]) -> None:
    """The server of a talk, the interval of a tuned one, a half-written run. The signal comes twice, and writes fail by then."""
    done = tmp_path / "done"
    terminal = Terminal([sys.executable, "-c", HUNG_UP, str(done)], {**env, "PYTHONPATH": str(ROOT)})
    terminal.read_until("begun")
    os.close(terminal._fd)
    time.sleep(0.2)
    os.kill(terminal._pid, signal.SIGHUP)
    _, status = os.waitpid(terminal._pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert done.read_text() == "in order"


def test_nohup_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[int, Any] = {}
    monkeypatch.setattr("signal.getsignal", lambda number: signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
    monkeypatch.setattr("signal.signal", taken.__setitem__)
    end_in_order()
    assert list(taken) == [signal.SIGTERM]


def test_a_run_that_is_terminated_keeps_what_it_measured(tmp_path: Path, env: dict[str, str]) -> None:
    recipe = tmp_path / "slow.toml"
    recipe.write_text(
        'name = "slow"\ndescription = "Slow."\n[load]\nconcurrency = 1\nconversations = 40\nturns = 1\nthink_time_s = 0.2\n'
        "[prompt]\nfirst_tokens = 16\n[output]\ntokens = 4\n"
    )
    with serving() as server:
        command = [*DIX, "bench", "run", str(recipe), "--url", f"http://127.0.0.1:{server.port}"]
        process = subprocess.Popen(command, env={**env, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        runs = tmp_path / "home" / "state" / "runs"
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in runs.glob("*/requests.jsonl")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 143
    run = json.loads(next(runs.glob("*/run.json")).read_text())
    assert (run["status"], run["valid"], run["reasons"]) == ("partial", False, ["interrupted"])
    assert 0 < run["counts"]["made"] < 40


# ---- clocks


def test_the_time_that_a_server_is_up_does_not_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    state = running_state(started_unix_s=time.time() + 86400)
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert 0 <= (_up_s(state) or -1) < 86400


# ---- logs


def write_lines(path: Path, first: int, last: int) -> None:
    with path.open("a") as file:
        for number in range(first, last):
            file.write(json.dumps({"time": f"{number:06}", "message": f"line {number}"}) + "\n")


@pytest.mark.parametrize("rotations", [1, 3])
def test_following_a_log_loses_and_repeats_no_line_when_it_rotates(tmp_path: Path, rotations: int) -> None:
    log, places = tmp_path / "front.log", {}
    write_lines(log, 0, 3)
    seen = read_new(tmp_path, places)
    written = 3
    for _ in range(rotations):
        write_lines(log, written, written + 40)  # the new file soon is longer than the old one was when it was read
        written += 40
        for number in range(4, 0, -1):
            if (old := tmp_path / f"front.log.{number}").exists():
                old.rename(tmp_path / f"front.log.{number + 1}")
        log.rename(tmp_path / "front.log.1")
    write_lines(log, written, written + 50)
    seen += read_new(tmp_path, places)
    write_lines(log, written + 50, written + 51)
    seen += read_new(tmp_path, places)
    assert [line.text for line in seen] == [f"line {number}" for number in range(written + 51)]


@pytest.mark.parametrize("harm", ["moved", "removed", "directory"])
def test_a_log_goes_on_where_it_was_when_others_move_or_remove_it(tmp_path: Path, harm: str) -> None:
    """As logrotate and tidy people do."""
    directory = tmp_path / "logs"
    directory.mkdir()
    handler, path = LogFile(directory / "front.log"), directory / "front.log"
    handler.emit(logging.makeLogRecord({"msg": "first"}))
    match harm:
        case "moved":
            path.rename(directory / "front.log-20260101")
        case "removed":
            path.unlink()
        case "directory":
            path.unlink()
            directory.rmdir()
    handler.emit(logging.makeLogRecord({"msg": "second"}))
    handler.emit(logging.makeLogRecord({"msg": "third"}))
    handler.close()
    assert path.read_text() == "second\nthird\n"


def test_a_log_on_a_full_disk_costs_its_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    (tmp_path / "front.log").symlink_to("/dev/full")
    handler = LogFile(tmp_path / "front.log")
    handler.emit(logging.makeLogRecord({"msg": "lost"}))
    (tmp_path / "front.log").unlink()
    handler.emit(logging.makeLogRecord({"msg": "kept"}))
    assert (tmp_path / "front.log").read_text() == "kept\n"


# ---- addresses


def test_a_port_alone_finds_a_server_of_ours_that_listens_on_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = prepare(Shared(), {}, {}, {"DIX_HOME": str(tmp_path / "home")})
    directory = server_dir(call.paths.state, "six")
    directory.mkdir(parents=True)
    write_state(directory, running_state(host="::1", port=4321))
    assert find_url(call, 4321, None) == "http://[::1]:4321"
    assert find_url(call, 4322, None) == "http://127.0.0.1:4322"


# ---- upgrades


def test_processes_of_another_version_refuse_the_settings_of_a_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_launch(tmp_path).prepare()
    assert load_launch(path).name == "s"
    document = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**document, "version": "0.0.1", "engine": {"unknown": 1}}))
    with pytest.raises(ConfigError, match=r"started by dix 0\.0\.1") as caught:
        load_launch(path)
    assert "dix stop" in caught.value.hint
    assert recorded_grace_s(path) == ServerConfig().grace_s  # stopping it still works
