"""Tells a step loop that has stopped from one that is working, lacks a processor, or waits for other ranks.

A long step is not a failure: it may compile kernels. But when the loop makes no progress and its process neither computes nor wants to,
waiting for the time of the longest step (`server.hang_timeout_s`) would be pointless.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from server.state import wants_to_run

WORKING_S = 0.02  # processor time between two looks, a second apart; idle threads and these looks take a tenth of it


class LoopWatch:
    """Looks at the process that it is part of, from a thread other than the loop's. Silent until `arm`."""

    def __init__(self, used_s: Callable[[], float] = time.process_time, wants: Callable[[], bool] | None = None) -> None:
        """used_s: processor time of this process. wants: whether another of its threads, or a child, computes or waits for a processor or
        a disk."""
        self._used_of, self._wants = used_s, wants or others_want_to_run
        self._waits: Callable[[], bool] | None = None
        self._used_s, self._count, self._still = 0.0, -1, 0

    def arm(self, waits: Callable[[], bool]) -> None:
        """From now on the loop has to go on. waits: whether it waits for other ranks, whose fault that is."""
        self._waits = waits

    def disarm(self) -> None:
        """The loop ends."""
        self._waits = None

    def look(self, count: int) -> int:
        """How many looks in a row have found the loop standing still. count: its iterations so far."""
        used_s, waits = self._used_of(), self._waits
        moved = count != self._count or used_s - self._used_s > WORKING_S
        self._used_s, self._count = used_s, count
        self._still = 0 if waits is None or moved or waits() or self._wants() else self._still + 1
        return self._still


def others_want_to_run() -> bool:
    """Of this process and all that it started: any thread but the caller's."""
    return wants_to_run(os.getpid(), besides=threading.get_native_id()) or any(wants_to_run(pid) for pid in descendants(os.getpid()))


def descendants(pid: int) -> list[int]:
    """Processes that a process and those started; none where the kernel does not list them."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # threads end at any time
            for child in map(int, listing.read_text().split()):
                found += [child, *descendants(child)]
    return found
