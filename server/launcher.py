"""Start and stop servers: in the foreground (`serve`), in the background (`start`), and from outside (`stop`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from engine.config import EngineConfig
from hicache.config import HiCacheConfig
from hicache.sizing import available_host_bytes
from server import gpu, listener, parent_death
from server.cache_files import KEPT_NAME, keep_cache, remove_cache, remove_orphans, segments
from server.config import ServerConfig
from server.errors import ConfigError, DixError, MachineError, ServerFailed, ServerUnreachable, machine_error
from server.hosts import Hosts
from server.launch import Launch, recorded_grace_s
from server.logs import open_log, tail
from server.processes import launch_gpus
from server.state import Lock, ServerState, clean_leftovers, is_running, read_state, remove_boot_dir, same_process, server_dir
from server.supervisor import STOP_REQUEST_NAME, Supervisor
from server.warm_file import read_warm_file

OnEvent = Callable[[dict[str, Any]], None]
EVENTS_NAME = "events.jsonl"
POLL_S = 0.05
STOP_MARGIN_S = 25.0
RANK_BYTES = 256 * 2**20  # what a rank takes that has loaded nothing but its libraries
MAX_NAME = 200  # bytes of a directory; a file system takes 255, less what is put behind it


@dataclass(frozen=True, slots=True)
class StopReport:
    """What stopping a server took. `killed` lists processes that had to be killed; `clean` is False when any had to."""

    name: str
    was_running: bool
    seconds: float
    killed: list[int]

    @property
    def clean(self) -> bool:
        return not self.killed


def serve(
    engine: EngineConfig,
    hicache: HiCacheConfig,
    server: ServerConfig,
    *,
    name: str,
    state_dir: Path,
    runtime_dir: Path,
    on_event: OnEvent,
    api_keys: list[str] | None = None,
    engine_factory: str = "",
    hosts: Hosts | None = None,
) -> int:
    """Run the supervisor in this process until it is told to stop. Returns 0. hosts: when the ranks of a server are on several hosts, each
    with a supervisor and a front of its own.

    Raises:
        PortInUse, ConfigError: before anything was started.
        ServerFailed: not ready, or a rank failed for good (`exit_code` 4, or the rank's own).
    """
    launch = make_launch(engine, hicache, server, name, state_dir, runtime_dir, engine_factory, hosts)
    return supervise(launch, state_dir, on_event, api_keys or [], take_lock(launch))


def make_launch(
    engine: EngineConfig,
    hicache: HiCacheConfig,
    server: ServerConfig,
    name: str,
    state_dir: Path,
    runtime_dir: Path,
    engine_factory: str = "",
    hosts: Hosts | None = None,
) -> Launch:
    if hosts is not None:
        hosts.local_ranks(engine.dp)  # an uneven division is refused before anything starts
        name = f"{name}-host{hosts.number}" if hosts.number else name  # hosts may share a home directory
    if len(os.fsencode(name)) > MAX_NAME:
        raise ConfigError(f"the name {name[:24]!r}… takes {len(os.fsencode(name))} bytes", hint=f"--name of at most {MAX_NAME}")
    if server.max_active and (engine.max_num_seqs == "auto" or int(engine.max_num_seqs) > server.max_active):
        engine = replace(engine, max_num_seqs=server.max_active)
    return Launch(
        name=name,
        boot_uuid=str(uuid.uuid4()),
        engine=engine,
        hicache=hicache,
        server=server,
        server_dir=str(server_dir(state_dir, name)),
        runtime_dir=str(runtime_dir),
        engine_factory=engine_factory,
        hosts=hosts,
    )


def take_lock(launch: Launch) -> Lock:
    """The right to run this server, or ConfigError. Whoever has it owns the server's directory."""
    directory = Path(launch.server_dir)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = Lock(directory)
    if lock.acquire():
        return lock
    state = read_state(directory)
    pid = f" (pid {state.supervisor.pid})" if state is not None and is_running(state) else ""
    raise ConfigError(f'a server named "{launch.name}" is running already{pid}', hint=f"dix stop {launch.name}, or choose another --name")


def supervise(launch: Launch, state_dir: Path, on_event: OnEvent, api_keys: list[str], lock: Lock) -> int:
    """Run the supervisor. It owns `lock` from now on."""
    directory = Path(launch.server_dir)
    try:
        killed = clean_leftovers(directory)
        _find_cache(directory)
        keys = api_keys + read_keys(launch.server.api_key_file)
        _check_exposure(launch.server, keys, on_event)
        _check_warm_file(launch)
        _check_memory(launch.local_ranks, available_host_bytes())
        _check_gpus(launch)
        launch_path = launch.prepare()
        open_log(launch.log_dir, "supervisor", launch.server.log_level)
        with listener.bind(launch.server.host, launch.server.port, state_dir) as sock:
            for record in killed:
                on_event({"event": "leftover_killed", "process": record.label, "pid": record.pid})
            on_event({"event": "bound", "host": sock.getsockname()[0], "port": sock.getsockname()[1]})
            return _run(Supervisor(launch, launch_path, sock, on_event, keys), directory)
    finally:
        remove_boot_dir(launch.boot_dir, launch.boot_uuid)  # when it ended between making it and running
        lock.release()


def _find_cache(directory: Path) -> None:
    """Before a start: what this server kept, or left when it was killed, may be used again; what no server owns goes."""
    had = (directory / KEPT_NAME).exists() or any(segments(directory))
    keep_cache(directory)  # its own segments are no orphans, although it does not run yet
    remove_orphans()
    if not had:
        remove_cache(directory)
    (directory / KEPT_NAME).unlink(missing_ok=True)


def _run(supervisor: Supervisor, directory: Path) -> int:
    try:
        return supervisor.run()
    finally:
        if supervisor.keep_cache:
            keep_cache(directory)
        else:
            remove_cache(directory)


def _check_exposure(config: ServerConfig, keys: list[str], on_event: OnEvent) -> None:
    if config.host not in ("127.0.0.1", "localhost", "::1") and not keys:
        if config.require_key:
            raise ConfigError(f"server.host is {config.host!r} and there is no API key", hint="--api-key-file FILE, or --host 127.0.0.1")
        message = f"listening on {config.host} without an API key: anyone who can reach this machine can use the model"
        on_event({"event": "warning", "message": message, "hint": "--api-key-file FILE"})


def _check_warm_file(launch: Launch) -> None:
    """Before anything is loaded. Raises ConfigError."""
    if not read_warm_file(launch.server.warm):
        return
    if not launch.hicache.enabled:
        raise ConfigError("server.warm needs the host prefix cache", hint="--hicache-size-gb auto, or no --warm")
    if launch.hicache.isolation == "api_key":
        raise ConfigError("server.warm fills the cache of no API key", hint="hicache.isolation none or field, or no --warm")


def _check_memory(ranks: int, available: int) -> None:
    """Raises MachineError when so many processes do not even fit without their model: starting them would take the machine down."""
    if ranks > 1 and ranks * RANK_BYTES > available:
        least, free = (f"{num_bytes / 2**30:,.1f} GiB" for num_bytes in (ranks * RANK_BYTES, available))
        raise MachineError(
            f"engine.dp is {ranks:,}: {ranks:,} ranks take {least} and more, {free} are free here",
            hint=f"--dp {max(1, available // RANK_BYTES):,} or less",
        )


def _check_gpus(launch: Launch) -> None:
    """Raises MachineError when a foreign program computes on a GPU that a rank would get."""
    devices = [] if launch.engine.device == "cpu" or launch.server.share_gpu else launch_gpus(launch)
    if devices:
        gpu.check_unoccupied(gpu.gpu_processes(), devices)


def read_keys(path: str) -> list[str]:
    """Accepted keys, one per line; empty lines do not count.

    Raises:
        ConfigError: the file cannot be read or holds no key.
    """
    if not path:
        return []
    try:
        keys = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(
            f"cannot read server.api_key_file {path!r}: {error.strerror}", hint="give a readable file with one key per line"
        ) from error
    if not keys:
        raise ConfigError(f"server.api_key_file {path!r} holds no key", hint="write one key per line")
    return keys


def start(
    engine: EngineConfig,
    hicache: HiCacheConfig,
    server: ServerConfig,
    *,
    name: str,
    state_dir: Path,
    runtime_dir: Path,
    on_event: OnEvent,
    ready_timeout_s: float | None = None,
    api_keys: list[str] | None = None,
    engine_factory: str = "",
    owned: bool = False,
) -> ServerState:
    """Start a server in the background and return when it is ready. Its events are passed on meanwhile.
    owned: it also stops when this thread ends in whatever way; ask for that from the main thread only.

    Raises:
        DixError: the background process's own failure, or ServerUnreachable after `ready_timeout_s`.
    """
    launch = make_launch(engine, hicache, server, name, state_dir, runtime_dir, engine_factory)
    directory = Path(launch.server_dir)
    limit_s = server.ready_timeout_s if ready_timeout_s is None else ready_timeout_s
    process: subprocess.Popen[bytes] | None = None
    lock = take_lock(launch)
    try:
        with _interrupts_later():
            process = _spawn_background(launch, state_dir, api_keys or [], lock, owned)
        lock.release()  # the supervisor holds it by the descriptor that it inherited
        return _wait_ready(process, directory / EVENTS_NAME, directory, on_event, limit_s)
    except BaseException:
        if process is not None:
            _end_background(process)
        raise
    finally:
        lock.release()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Signals that end wait for the end of the block: an exception out of the middle of a fork would leave a child that nobody knows."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive in the main thread only
        return
    came: list[int] = []
    later = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in later}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _spawn_background(launch: Launch, state_dir: Path, api_keys: list[str], lock: Lock, owned: bool) -> subprocess.Popen[bytes]:
    """A supervisor in a session of its own. Keys travel through a pipe: others can read command lines, and files stay behind."""
    directory = Path(launch.server_dir)
    owner = [str(os.getpid())] if owned else []
    request = directory / "start.json"
    with open(os.open(request, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(launch))
    (directory / EVENTS_NAME).write_bytes(b"")
    with (directory / "supervisor.out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "server.launcher", str(request), str(state_dir), str(lock.descriptor), *owner],
            pass_fds=(lock.descriptor,),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(api_keys).encode())
    process.stdin.close()
    return process


def _wait_ready(process: subprocess.Popen[bytes], events_path: Path, directory: Path, on_event: OnEvent, limit_s: float) -> ServerState:
    deadline = time.monotonic() + limit_s
    with events_path.open() as events:
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            for event in _complete_lines(events):
                on_event(event)
                if event["event"] == "error":
                    raise ServerFailed(event["message"], hint=event["hint"], exit_code=event["exit_code"])
                state = read_state(directory)
                if event["event"] == "ready" and state is not None:
                    return state
            if ended:
                lines = tail(directory / "supervisor.out")
                raise ServerFailed(
                    f"the server ended during start: {lines[-1] if lines else f'status {process.returncode}'}", hint="see: dix logs"
                )
            time.sleep(POLL_S)
    raise ServerUnreachable(f"not ready after {limit_s:.0f} s", hint="raise --ready-timeout, or see: dix logs")


def _complete_lines(events: IO[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        position = events.tell()
        line = events.readline()
        if not line.endswith("\n"):
            events.seek(position)
            return found
        found.append(json.loads(line))


def _end_background(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # the second one skips the drain
        try:
            process.wait(STOP_MARGIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stop(name: str, state_dir: Path, grace_s: float | None = None, *, keep_cache: bool = False) -> StopReport:
    """Stop a server and everything it started. The supervisor drains and ends its children; one that does not react is killed with them.
    keep_cache: leave what the prefix cache holds to the server's next start.

    Raises:
        ServerUnreachable: there is no such server.
    """
    began_s = time.monotonic()
    directory = server_dir(state_dir, name)
    state = read_state(directory)
    if state is None:
        raise ServerUnreachable(f'no server named "{name}" is running', hint="dix status lists the running ones")
    if not is_running(state):
        leftovers = clean_leftovers(directory)
        if not keep_cache:
            remove_cache(directory)
        return StopReport(name, False, time.monotonic() - began_s, [record.pid for record in leftovers])
    if grace_s is not None or keep_cache:
        request = {"grace_s": grace_s, "keep_cache": keep_cache, "boot_uuid": state.boot_uuid}
        (directory / STOP_REQUEST_NAME).write_bytes(msgspec.json.encode(request))
    os.kill(state.supervisor.pid, signal.SIGTERM)
    grace = grace_s if grace_s is not None else recorded_grace_s(directory / "launch.json")
    deadline = time.monotonic() + grace + STOP_MARGIN_S
    while same_process(state.supervisor, state.host_boot_id) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    killed = []
    if same_process(state.supervisor, state.host_boot_id):
        os.kill(state.supervisor.pid, signal.SIGKILL)
        killed.append(state.supervisor.pid)
        time.sleep(0.5)  # the kernel and the guards end the children now
    killed += [record.pid for record in clean_leftovers(directory)]
    return StopReport(name, True, time.monotonic() - began_s, killed)


def background_main(arguments: list[str]) -> int:
    """The background supervisor: `python -m server.launcher START_FILE STATE_DIR LOCK_FD [OWNER_PID]`, keys as JSON on stdin."""
    request, state_dir = Path(arguments[0]), Path(arguments[1])
    lock = Lock.adopt(request.parent, int(arguments[2]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # until the supervisor has handlers of its own
    if len(arguments) > 3:
        parent_death.arm(int(arguments[3]), signal.SIGTERM)
    api_keys = json.loads(sys.stdin.read())
    launch = msgspec.json.decode(request.read_bytes(), type=Launch)
    with (request.parent / EVENTS_NAME).open("a", buffering=1) as events:

        def on_event(event: dict[str, Any]) -> None:
            events.write(json.dumps(event, default=str) + "\n")

        try:
            return supervise(launch, state_dir, on_event, api_keys, lock)
        except (DixError, OSError, MemoryError) as error:
            failure = error if isinstance(error, DixError) else machine_error(error)
            if failure is None:
                raise
            on_event({"event": "error", "message": str(failure), "hint": failure.hint, "exit_code": failure.exit_code})
            return failure.exit_code


if __name__ == "__main__":
    sys.exit(background_main(sys.argv[1:]))
