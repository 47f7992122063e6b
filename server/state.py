"""State files of running servers: what they are, where they listen, and how to tell that a recorded process is still the same."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from server.guard import start_time
from server.launch import BOOT_VARIABLE

VERSION = 1
STATE_NAME = "state.json"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process: `start_time` is field 22 of /proc/PID/stat, which tells a reused pid from the original."""

    role: str
    pid: int
    start_time: str
    group: int
    rank: int = -1
    gpu: str = ""

    @property
    def label(self) -> str:
        return f"rank {self.rank}" if self.role == "rank" else self.role


@dataclass(frozen=True, slots=True)
class ServerState:
    """What `status` shows and `stop` needs. state: starting, ready, restarting, draining, dead."""

    name: str
    boot_uuid: str
    host_boot_id: str
    host: str
    port: int
    model: str
    served_name: str
    state: str
    supervisor: ProcessRecord
    processes: list[ProcessRecord] = field(default_factory=list)
    incarnation: int = 0
    restarts: int = 0
    last_failure: str = ""
    started_unix_s: float = 0.0
    log_dir: str = ""
    server_dir: str = ""
    runtime_dir: str = ""
    version: int = VERSION

    @property
    def base_url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def host_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def record_self(role: str) -> ProcessRecord:
    pid = os.getpid()
    return ProcessRecord(role, pid, start_time(pid), os.getpgrp())


def same_process(record: ProcessRecord, boot_id: str, boot_uuid: str | None = None) -> bool:
    """Whether the recorded process still runs: same host boot, same start time, and (for children) our boot id in its environment."""
    if boot_id != host_boot_id() or not record.start_time or start_time(record.pid) != record.start_time:
        return False
    if boot_uuid is None:
        return not is_zombie(record.pid)
    try:
        environment = Path(f"/proc/{record.pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{BOOT_VARIABLE}={boot_uuid}".encode() in environment.split(b"\0")


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wants_to_run(pid: int, besides: int = 0) -> bool:
    """Whether a thread of the process computes, or would if a processor or a disk were free. False for a stopped or a waiting process.
    besides: a thread that does not count, by its id."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # threads end at any time
            if stat.parent.name != str(besides) and stat.read_text().rpartition(")")[2].split()[0] in ("R", "D"):
                return True
    return False


def servers_dir(state_dir: Path) -> Path:
    return state_dir / "servers"


def server_dir(state_dir: Path, name: str) -> Path:
    """Directory of one server. A name is one path component."""
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".") or "server"
    return servers_dir(state_dir) / safe


def write_state(directory: Path, state: ServerState) -> None:
    """Replace the state file atomically, readable by its owner only."""
    temporary = directory / f"{STATE_NAME}.tmp"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state)))
    temporary.rename(directory / STATE_NAME)


def read_state(directory: Path) -> ServerState | None:
    """The recorded state, alive or not; None when there is none, it was written by another version, or it belongs to another user."""
    try:
        return msgspec.json.decode((directory / STATE_NAME).read_bytes(), type=ServerState)
    except (OSError, msgspec.DecodeError):
        return None


def is_running(state: ServerState) -> bool:
    return same_process(state.supervisor, state.host_boot_id)


def list_servers(state_dir: Path) -> list[ServerState]:
    """Every running server, its supervisor verified by start time and host boot id."""
    found = [read_state(path.parent) for path in sorted(servers_dir(state_dir).glob(f"*/{STATE_NAME}"))]
    return [state for state in found if state is not None and is_running(state)]


class Lock:
    """An exclusive flock that lives as long as the supervisor. `dix start` takes it and hands it down, so two starts never meet; children
    of the supervisor do not inherit it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._file: IO[bytes] | None = None

    @classmethod
    def adopt(cls, directory: Path, descriptor: int) -> Lock:
        """The lock that the parent process took."""
        os.set_inheritable(descriptor, False)
        lock = cls(directory)
        lock._file = open(descriptor, "r+b")  # noqa: SIM115
        return lock

    @property
    def descriptor(self) -> int:
        assert self._file is not None, "the lock is not held"
        return self._file.fileno()

    def acquire(self) -> bool:
        file = open(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def clean_leftovers(directory: Path) -> list[ProcessRecord]:
    """End the groups that a dead supervisor left behind, remove its sockets and state file. Returns what was killed.

    A pid that another program uses by now is left alone.
    """
    state = read_state(directory)
    if state is None:
        return []
    killed = []
    for record in state.processes:
        if same_process(record, state.host_boot_id, state.boot_uuid):
            _kill_group(record)
            killed.append(record)
    deadline = time.monotonic() + 5.0
    while (
        any(start_time(record.pid) == record.start_time and not is_zombie(record.pid) for record in killed) and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    remove_boot_dir(Path(state.runtime_dir), state.boot_uuid)
    (directory / STATE_NAME).unlink(missing_ok=True)
    return killed


def _kill_group(record: ProcessRecord) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended between the check and the signal
        os.killpg(record.group, signal.SIGKILL)


def remove_boot_dir(path: Path, boot_uuid: str) -> None:
    """Remove the sockets and shared files of one boot; they are plain files in one directory, which is named after it. A path from a state
    file that is named otherwise is not ours to empty.
    """
    if not boot_uuid or path.name != boot_uuid[:8] or not path.is_dir():
        return
    for entry in path.iterdir():
        entry.unlink(missing_ok=True)
    path.rmdir()
