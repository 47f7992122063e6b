"""The load harness as a child in a process group of its own: started, watched, and gone when we are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from server import guard


class HarnessProcess:
    """The harness, its own eight processes, and a guard that kills the group at our death. Use as a context manager."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path) -> None:
        # A group in our session, not a session: the guard must be able to join it. Ctrl-C at the terminal does not reach it.
        self._pipe, self._held = os.pipe()
        with log.open("wb") as sink:
            self._child = subprocess.Popen(
                list(arguments), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=dict(environment), cwd=folder, process_group=0
            )
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(self._pipe), str(self._child.pid)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=(self._pipe,),
                process_group=self._child.pid,
            )

    def __enter__(self) -> HarnessProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._child.poll()

    def interrupt(self) -> None:
        """Ask for the partial export, as one Ctrl-C does."""
        self._signal(signal.SIGINT)

    def terminate(self, patience_s: float = 5.0) -> None:
        """TERM to the group, then KILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + patience_s
        while self.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Nothing of the group is left when this returns. The guard is a member, so the group's id is still ours."""
        if self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._child.wait()
        self._guard.wait()
        for descriptor in (self._pipe, self._held):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            self._child.send_signal(number)

    def cpu_seconds(self) -> dict[int, float]:
        """Pid -> user and system time of every harness process that is alive."""
        out: dict[int, float] = {}
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(self.pid)
            for process in [leader, *leader.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    out[process.pid] = times.user + times.system
        return out


class ClockWatch:
    """Largest step of the wall clock against the monotonic clock between two looks. Slow slewing is not a step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._offset_s = time.time() - time.monotonic()

    def look(self) -> None:
        offset_s = time.time() - time.monotonic()
        self.step_s = max(self.step_s, abs(offset_s - self._offset_s))
        self._offset_s = offset_s


class CpuWatch:
    """Share of a core of the busiest harness process over the window."""

    def __init__(self) -> None:
        self._first: tuple[float, dict[int, float]] | None = None
        self.share = 0.0

    def look(self, process: HarnessProcess) -> None:
        now_s, used = time.monotonic(), process.cpu_seconds()
        if self._first is None:
            self._first = (now_s, used)
            return
        began_s, before = self._first
        if now_s - began_s >= 1.0:
            grown = [seconds - before[pid] for pid, seconds in used.items() if pid in before]
            self.share = max(grown, default=0.0) / (now_s - began_s)
