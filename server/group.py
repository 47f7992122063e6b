"""The children of one boot: the front and one incarnation of ranks, with the channels that connect them to the supervisor."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.channel import LineReader, send_line
from server.gpu import GpuProcess, still_on_gpu
from server.guard import start_time
from server.heartbeat import HeartbeatFile
from server.launch import Launch
from server.logs import tail
from server.processes import Child, end_groups, launch_gpus, reap_orphans, spawn
from server.state import ProcessRecord, wants_to_run

TERM_PATIENCE_S = 10.0
START_S = 60.0  # until a process has loaded the code that beats, on a busy machine
CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
STACK_DUMP_S = 1.0
ECHO_PATIENCE_S = 1.0  # a killed process is seen dead once its memory is gone, which peers notice earlier
FROZEN_S = 5.0  # the supervisor looks several times a second
AWAKE_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong. kind: death, hang, fatal. `rank` is -1 for the front. crash: the process failed by itself, nobody ended it."""

    kind: str
    rank: int
    message: str
    hint: str = ""
    exit_code: int = 4
    crash: bool = False


class ProcessGroup:
    """Starts, watches and ends the children. Knows nothing of policy. All ranks of a server are coupled: they start and end together."""

    def __init__(self, launch: Launch, launch_path: Path, listener: socket.socket, api_keys: list[str]) -> None:
        self.launch = launch
        self.launch_path = launch_path
        self.listener = listener
        self.api_keys = api_keys
        self.incarnation = 0
        self.gpus = launch_gpus(launch)
        self.front: Child | None = None
        self.ranks: list[Child] = []
        self.heartbeats = HeartbeatFile(launch.heartbeat_path, slots=launch.local_ranks + 1)
        self._guard_read, self._guard_write = os.pipe()
        self._control: socket.socket | None = None
        self._control_lines: LineReader | None = None
        self._reports: list[LineReader] = []
        self._fatal: dict[int, dict[str, Any]] = {}
        self._echo_since_s: float | None = None
        self._looked_s = time.monotonic()
        self._awake_since_s = float("-inf")
        self.left_on_gpus: list[GpuProcess] = []

    def start_front(self) -> None:
        self.heartbeats.reset(self.launch.local_ranks, self.launch.server.ready_timeout_s, START_S)
        ours, theirs = socket.socketpair()
        arguments = ["server.front", str(self.launch_path), f"--control={theirs.fileno()}", f"--listener={self.listener.fileno()}"]
        arguments.append(f"--parent={os.getpid()}")
        self.front = spawn(
            "front",
            -1,
            arguments,
            boot_uuid=self.launch.boot_uuid,
            output=self.launch.log_dir / "front.out",
            guard_pipe=self._guard_read,
            pass_fds=(theirs.fileno(), self.listener.fileno()),
        )
        theirs.close()
        self._control, self._control_lines = ours, LineReader(os.dup(ours.fileno()))
        self.tell_front({"op": "keys", "keys": self.api_keys})

    def start_ranks(self) -> None:
        self.incarnation += 1
        self._fatal.clear()
        self._echo_since_s = None
        self.tell_front({"op": "incarnation", "incarnation": self.incarnation})
        self.launch.rendezvous_path(self.incarnation).unlink(missing_ok=True)
        for rank in range(self.launch.local_ranks):
            self.heartbeats.reset(rank, self.launch.server.ready_timeout_s, START_S)
            read_end, write_end = os.pipe()
            arguments = ["server.rank", str(self.launch_path), f"--rank={rank}", f"--incarnation={self.incarnation}"]
            arguments += [f"--parent={os.getpid()}", f"--report={write_end}"]
            output = self.launch.log_dir / f"rank-{rank}.out"
            child = spawn(
                "rank", rank, arguments, boot_uuid=self.launch.boot_uuid, output=output, guard_pipe=self._guard_read, pass_fds=(write_end,)
            )
            os.close(write_end)
            self.ranks.append(child)
            self._reports.append(LineReader(read_end))

    def restore_files(self) -> bool:
        """Before ranks start again: make what a logout, a cleaner or a person removed from the server's directories. True when sockets were
        gone; the front then has to start again, since nobody can reach the one that it listens on.

        Raises:
            OSError: they cannot be made now.
        """
        lost = not self.launch.heartbeat_path.exists() or not self.launch.socket_path.exists()
        if lost or not self.launch_path.exists() or not self.launch.log_dir.is_dir():
            self.launch.prepare()
        if lost:
            self.kill_front()
            self.heartbeats = HeartbeatFile(self.launch.heartbeat_path, slots=self.launch.local_ranks + 1)
        return lost

    @property
    def descriptors(self) -> list[int]:
        readers = [*self._reports, *([self._control_lines] if self._control_lines else [])]
        return [reader.descriptor for reader in readers if not reader.closed]

    @property
    def children(self) -> list[Child]:
        return [*([self.front] if self.front else []), *self.ranks]

    def records(self) -> list[ProcessRecord]:
        records = []
        for child in self.children:
            records.append(ProcessRecord(child.role, child.pid, child.start_time, child.pid, child.rank, self._gpu(child.rank)))
            records.append(ProcessRecord("guard", child.guard.pid, start_time(child.guard.pid), child.pid, child.rank))
        return records

    def _gpu(self, rank: int) -> str:
        return self.gpus[rank] if self.gpus and rank >= 0 else ""

    def tell_front(self, message: dict[str, Any]) -> None:
        # A front that is gone is found by `failure`; a message to it has no other use.
        if self._control is not None:
            send_line(self._control, message)

    def read(self) -> list[dict[str, Any]]:
        """Messages of all children since the last call; those of ranks carry `rank`. Fatal ones are kept for `failure`."""
        messages = []
        for rank, reader in enumerate(self._reports):
            messages += [{**message, "rank": rank} for message in reader.read()]
        if self._control_lines is not None:
            messages += [{**message, "rank": -1} for message in self._control_lines.read()]
        for message in messages:
            if message.get("event") == "fatal":
                self._fatal.setdefault(message["rank"], message)
        return messages

    def failure(self) -> Failure | None:
        """The first thing wrong with any child. A cause is preferred over its echo in peers: a rank that only lost a peer is not blamed
        while the peer that is dying may still be seen dead.
        """
        reap_orphans({pid for child in self.children for pid in (child.pid, child.guard.pid)})
        dead = [child for child in self.children if not child.alive]
        if dead:
            self.read()
        causes = [child for child in dead if not self._is_echo(child.rank)]
        if causes:
            return self._describe_death(causes[0])
        if self._fatal:
            return self._describe_fatals()
        return self._lost_guard() or self._hang()

    def _lost_guard(self) -> Failure | None:
        """A group without its guard could outlive the supervisor, so it is not left running."""
        for child in self.children:
            if child.guard.poll() is not None:
                return Failure("death", child.rank, f"the guard of {child.name} (pid {child.guard.pid}) ended")
        return None

    def _hang(self) -> Failure | None:
        """A process that gets no processor time is starved, not stopped; only the limit on its loop still applies."""
        if self._slept():
            return None
        for child in self.children:
            slot = self.launch.local_ranks if child.role == "front" else child.rank
            beat = self.heartbeats.read(slot)
            complaint = beat.complaint
            if complaint and beat.silent and wants_to_run(child.pid):
                complaint = beat.loop_complaint
            if complaint:
                return Failure("hang", child.rank, f"{child.name} hangs: {complaint}")
        return None

    def _slept(self) -> bool:
        """Whether this process was just frozen, as in a paused container or a suspended machine: then give the children time to beat."""
        now = time.monotonic()
        if now - self._looked_s > FROZEN_S:
            self._awake_since_s = now
        self._looked_s = now
        return now - self._awake_since_s < AWAKE_PATIENCE_S

    def _is_echo(self, rank: int) -> bool:
        return bool(self._fatal.get(rank, {}).get("echo"))

    def _describe_fatals(self) -> Failure | None:
        blamed = min(self._fatal, key=self._is_echo)
        if self._is_echo(blamed):
            if self._echo_since_s is None:
                self._echo_since_s = time.monotonic()
            if time.monotonic() - self._echo_since_s < ECHO_PATIENCE_S:
                return None
        return self._describe_fatal(blamed)

    def _describe_fatal(self, rank: int) -> Failure:
        message = self._fatal[rank]
        return Failure(
            "fatal", rank, message["message"], message.get("hint", ""), message.get("exit_code", 4), crash=not self._is_echo(rank)
        )

    def _describe_death(self, child: Child) -> Failure:
        if child.rank in self._fatal:
            return self._describe_fatal(child.rank)
        code = child.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        crash = code >= 0 or -code in CRASH_SIGNALS
        return Failure("death", child.rank, f"{child.name} (pid {child.pid}) {how}", crash=crash)

    def log_tail(self, rank: int) -> list[str]:
        name = "front" if rank < 0 else f"rank-{rank}"
        return tail(self.launch.log_dir / f"{name}.out") or tail(self.launch.log_dir / f"{name}.log")

    def dump_stacks(self, rank: int) -> None:
        """Ask a hung rank for the stacks of its threads; they land in its .out file."""
        self.ranks[rank].signal_leader(signal.SIGUSR1)
        time.sleep(STACK_DUMP_S)

    def kill_ranks(self) -> None:
        for child in self.ranks:
            child.kill_group()
        self._forget_ranks()

    def kill_front(self) -> None:
        if self.front is not None:
            self.front.kill_group()
        self._forget_front()

    def end(self) -> list[int]:
        """Ranks, then the front: SIGTERM, patience, SIGKILL. Returns the pids that needed the last."""
        pids = [child.pid for child in self.ranks]
        stubborn = end_groups(self.ranks, TERM_PATIENCE_S)
        if self.front is not None:
            stubborn += end_groups([self.front], TERM_PATIENCE_S)
        self._forget_ranks()
        self._forget_front()
        self.left_on_gpus = still_on_gpu(pids) if self.gpus else []
        return stubborn

    def close(self) -> None:
        """End whatever still runs and close the guards' pipe, which ends every group that this process could not."""
        self.kill_ranks()
        self.kill_front()
        os.close(self._guard_write)
        os.close(self._guard_read)

    def _forget_ranks(self) -> None:
        for reader in self._reports:
            os.close(reader.descriptor)
        self._reports.clear()
        self.ranks.clear()

    def _forget_front(self) -> None:
        if self._control is not None and self._control_lines is not None:
            self._control.close()
            os.close(self._control_lines.descriptor)
        self._control = self._control_lines = self.front = None
