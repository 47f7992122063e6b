"""A program at a terminal of its own, typed to and read like a person would."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from types import TracebackType
from typing import Self

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A child process whose standard streams are a pseudo-terminal."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._pid, self._fd = os.forkpty()
        if self._pid == 0:
            os.execvpe(command[0], command, env)
        self._unread = ""

    def type(self, line: str) -> None:
        os.write(self._fd, line.encode() + b"\n")

    def read_until(self, text: str, timeout_s: float = 60) -> str:
        """Everything up to and with `text`, control sequences removed."""
        deadline = time.monotonic() + timeout_s
        while text not in self._unread:
            ready = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"{text!r} did not appear in {timeout_s} s; seen: {self._unread!r}"
            self._unread += _CONTROL.sub("", os.read(self._fd, 65536).decode("utf-8", "replace"))
        seen, self._unread = self._unread.split(text, 1)
        return seen + text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)
