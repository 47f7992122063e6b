"""The root of the process tree: starts front and ranks, watches them, restarts the ranks after a failure, ends everything at stop."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from server.errors import ServerFailed
from server.group import Failure, ProcessGroup
from server.launch import Launch
from server.parent_death import become_subreaper
from server.restart_policy import RestartPolicy
from server.state import STATE_NAME, ServerState, host_boot_id, record_self, remove_boot_dir, write_state

POLL_S = 0.2
FRONT_EXIT_S = 5.0
RECORD_AGAIN_S = 2.0
STOP_REQUEST_NAME = "stop.json"
log = logging.getLogger("supervisor")


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"


class Signals:
    """SIGTERM and SIGINT as a count; SIGHUP ignored; any signal, SIGCHLD included, ends a wait at once."""

    def __init__(self) -> None:
        self.stops = 0
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._old: dict[int, Any] = {}
        for number, handler in (
            (signal.SIGTERM, self._stop),
            (signal.SIGINT, self._stop),
            (signal.SIGHUP, signal.SIG_IGN),
            (signal.SIGCHLD, lambda *_: None),
        ):
            self._old[number] = signal.signal(number, handler)

    def _stop(self, _number: int, _frame: Any) -> None:
        self.stops += 1

    def wait(self, descriptors: list[int], timeout_s: float) -> None:
        """Return when something arrived, a signal came, or the time is over."""
        readable, _, _ = select.select([self._read.fileno(), *descriptors], [], [], timeout_s)
        if self._read.fileno() in readable:
            self._read.recv(4096)

    def restore(self) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()


class Supervisor:
    """Runs in the main thread of its process: children die with the thread that forked them."""

    def __init__(
        self, launch: Launch, launch_path: Path, listener: socket.socket, on_event: Callable[[dict[str, Any]], None], api_keys: list[str]
    ) -> None:
        self.launch = launch
        self.on_event = on_event
        self.group = ProcessGroup(launch, launch_path, listener, api_keys)
        self.policy = RestartPolicy(launch.server.restart)
        self.phase = Phase.STARTING
        self.started_s = time.monotonic()
        self._phase_since_s = self.started_s
        self._restart_at_s: float | None = None
        self._record_again_s: float | None = None
        self._ready_ranks: set[int] = set()
        self._serving = False
        self._drained = False
        self._ever_ready = False
        self.keep_cache = launch.hicache.keep_on_exit
        host, port = listener.getsockname()[:2]
        self.state = ServerState(
            name=launch.name,
            boot_uuid=launch.boot_uuid,
            host_boot_id=host_boot_id(),
            host=host,
            port=port,
            model=launch.engine.model,
            served_name=launch.served_name,
            state=Phase.STARTING,
            supervisor=record_self("supervisor"),
            started_unix_s=time.time(),
            log_dir=str(launch.log_dir),
            server_dir=launch.server_dir,
            runtime_dir=str(launch.boot_dir),
        )

    def run(self) -> int:
        """Serve until a signal or an unrecoverable failure. Returns 0 after a clean stop.

        Raises:
            ServerFailed: the server did not become ready, or a failure ended it.
        """
        assert threading.current_thread() is threading.main_thread(), "the supervisor must run in the main thread"
        become_subreaper()
        signals = Signals()
        try:
            self.group.start_front()
            self._start_ranks()
            return self._watch(signals)
        finally:
            self.group.close()
            remove_boot_dir(self.launch.boot_dir, self.launch.boot_uuid)
            (Path(self.launch.server_dir) / STATE_NAME).unlink(missing_ok=True)
            signals.restore()

    def _watch(self, signals: Signals) -> int:
        while not signals.stops:
            signals.wait(self.group.descriptors, POLL_S)
            self._read_messages()
            if self._record_again_s is not None and time.monotonic() >= self._record_again_s:
                self._record()
            if self._restart_at_s is not None:
                self._restart_when_due()
            elif failure := self.group.failure() or self._too_slow():
                self._recover(failure)
        return self._stop(signals)

    def _start_ranks(self) -> None:
        self._ready_ranks.clear()
        self._serving = False
        self._phase_since_s = time.monotonic()
        self.group.start_ranks()
        self._record(incarnation=self.group.incarnation)

    def _read_messages(self) -> None:
        for message in self.group.read():
            event, rank = message.get("event"), message["rank"]
            if event == "progress":
                self._emit("progress", rank=rank, stage=message["stage"], fraction=message["fraction"])
            elif event == "ready":
                self._ready_ranks.add(rank)
                self._emit("rank_ready", rank=rank, limits=message["limits"])
                if len(self._ready_ranks) == self.launch.local_ranks:
                    self.group.tell_front({"op": "ready", "incarnation": self.group.incarnation, "pids": [c.pid for c in self.group.ranks]})
            elif event == "serving" and message["incarnation"] == self.group.incarnation:
                self._become_ready()
            elif event == "drained":
                self._drained = True

    def _become_ready(self) -> None:
        self._serving = self._ever_ready = True
        self.phase = Phase.READY
        seconds = time.monotonic() - self._phase_since_s
        self._record(state=Phase.READY)
        self._emit(
            "ready",
            host=self.state.host,
            port=self.state.port,
            url=self.state.base_url,
            seconds=seconds,
            incarnation=self.group.incarnation,
        )

    def _too_slow(self) -> Failure | None:
        limit = self.launch.server.ready_timeout_s
        if self._serving or time.monotonic() - self._phase_since_s < limit:
            return None
        late = [rank for rank in range(self.launch.local_ranks) if rank not in self._ready_ranks]
        return Failure("hang", late[0] if late else -1, f"not ready after {limit:.0f} s", "raise --ready-timeout, or see: dix logs")

    def _recover(self, failure: Failure) -> None:
        """Fail open requests, end the ranks, then restart or give up. In this order, so that clients hear of it before slow work."""
        log.error("%s", failure.message, extra={"event": failure.kind})
        lines = self.group.log_tail(failure.rank)
        for line in lines:
            log.error("%s| %s", "front" if failure.rank < 0 else f"rank {failure.rank}", line)
        pause_s = self.policy.next_pause_s(time.monotonic()) if self._ever_ready else None
        kind = "hang" if failure.kind == "hang" else "death"
        self.group.tell_front(
            {
                "op": "failed",
                "rank": failure.rank,
                "kind": kind,
                "message": failure.message,
                "crash": failure.crash,
                "restarting": pause_s is not None,
            }
        )
        self._emit("failure", kind=failure.kind, rank=failure.rank, message=failure.message, restarting=pause_s is not None)
        if failure.kind == "hang" and failure.rank >= 0:
            self.group.dump_stacks(failure.rank)
        self.group.kill_ranks()
        if failure.rank < 0:
            self.group.kill_front()
        if pause_s is None:
            self._give_up(failure, lines)
            return
        self.phase = Phase.RESTARTING
        self._restart_at_s = time.monotonic() + pause_s
        self._record(state=Phase.RESTARTING, restarts=self.state.restarts + 1, last_failure=failure.message)

    def _give_up(self, failure: Failure, lines: list[str]) -> None:
        self._record(state="dead", last_failure=failure.message)
        self.group.tell_front({"op": "finish"})
        self._wait_for_front(FRONT_EXIT_S)
        self._emit("log_tail", rank=failure.rank, lines=lines)
        hint = failure.hint or f"see the logs in {self.launch.log_dir}"
        raise ServerFailed(failure.message, hint=hint, exit_code=failure.exit_code)

    def _restart_when_due(self) -> None:
        if self._restart_at_s is None or time.monotonic() < self._restart_at_s:
            return
        try:
            if self.group.restore_files():
                log.warning("the directory of sockets %s was removed; made again", self.launch.boot_dir)
        except OSError as error:
            log.error("the ranks cannot start again yet: %s", error)
            self._restart_at_s = time.monotonic() + RECORD_AGAIN_S
            return
        self._restart_at_s = None
        if self.group.front is None:
            self.group.start_front()
        self._emit("restarting", incarnation=self.group.incarnation + 1)
        self._start_ranks()

    def _stop(self, signals: Signals) -> int:
        """Drain until the grace is over or a second signal comes, then end all processes."""
        grace_s = self._grace_s()
        self.phase = Phase.DRAINING
        self._record(state=Phase.DRAINING)
        self._emit("draining", grace_s=grace_s)
        self.group.tell_front({"op": "drain"})
        deadline = time.monotonic() + grace_s
        while self._serving and not self._drained and signals.stops < 2 and time.monotonic() < deadline:
            signals.wait(self.group.descriptors, POLL_S)
            self._read_messages()
            if self.group.failure() is not None:
                break
        self.group.tell_front({"op": "finish"})
        self._wait_for_front(FRONT_EXIT_S)
        stubborn = self.group.end()
        if stubborn:
            log.warning("killed after SIGTERM had no effect: %s", stubborn)
        for process in self.group.left_on_gpus:
            text = f"pid {process.pid} of this server still holds {process.used_bytes / 2**30:.1f} GiB of GPU {process.gpu}"
            self._emit("warning", message=text, hint="nvidia-smi shows who uses it")
        self._emit("stopped", killed=stubborn)
        return 0

    def _wait_for_front(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.group.front is not None and self.group.front.alive and time.monotonic() < deadline:
            time.sleep(0.02)

    def _grace_s(self) -> float:
        """The stop command may leave a shorter or longer grace than the server's own, and ask to keep the cache."""
        path = Path(self.launch.server_dir) / STOP_REQUEST_NAME
        if not path.exists():
            return self.launch.server.grace_s
        request = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        path.unlink()
        if request.get("boot_uuid") != self.launch.boot_uuid:
            return self.launch.server.grace_s
        self.keep_cache = self.keep_cache or bool(request.get("keep_cache"))
        asked = request.get("grace_s")
        return self.launch.server.grace_s if asked is None else float(asked)

    def _record(self, **changes: Any) -> None:
        """Write the state file. A full disk does not end a server that has served: writing is tried again until it succeeds."""
        self.state = replace(self.state, processes=self.group.records(), **changes)
        try:
            write_state(Path(self.launch.server_dir), self.state)
            self._record_again_s = None
        except OSError as error:
            if not self._ever_ready:
                raise
            if self._record_again_s is None:
                log.error("the state file cannot be written, dix status shows an old one: %s", error)
            self._record_again_s = time.monotonic() + RECORD_AGAIN_S

    def _emit(self, event: str, **values: Any) -> None:
        line = " ".join([event, *flat_words(values)])
        log.log(logging.DEBUG if event == "progress" else logging.INFO, "%s", line, extra={"event": event})
        elapsed_s = time.monotonic() - self.started_s
        try:
            self.on_event({"event": event, "time": time.time(), "elapsed_s": elapsed_s, "pid": os.getpid(), **values})
        except OSError as error:  # the terminal was closed, the reader of a pipe left, the disk is full: no reason to stop serving
            log.warning("the event %s could not be delivered: %s", event, error)


def flat_words(values: Mapping[str, Any]) -> list[str]:
    """`name=value` of all values, nested ones included, for a line of the log."""
    inner = [(flat_words(value) if isinstance(value, Mapping) else [f"{name}={value}"]) for name, value in values.items()]
    return [word for words in inner for word in words]
