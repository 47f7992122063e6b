"""Heart-beats in a small shared file: one slot per rank, written by the rank, read by supervisor and front.

A slot holds two stamps of the system-wide monotonic clock: one by the step loop itself (a stale one means a hung loop) and one by a plain
thread (a stale one means a stopped process), the count of loop iterations, and how long the present phase may go without a tick.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SLOT_BYTES = 64
_LOOP, _PROCESS, _LIMIT, _COUNT = 0, 8, 16, 24
PROCESS_DEAD_S = 10.0


@dataclass(frozen=True, slots=True)
class Beat:
    """Ages in seconds. `limit_s` bounds `loop_age_s` in the present phase."""

    loop_age_s: float
    process_age_s: float
    limit_s: float
    count: int

    @property
    def complaint(self) -> str:
        """Why this rank must be taken for hung, or "" while it is fine."""
        if self.process_age_s > PROCESS_DEAD_S:
            return f"the process has not run for {self.process_age_s:.0f} s"
        if self.loop_age_s > self.limit_s:
            return f"the step loop has not ticked for {self.loop_age_s:.0f} s (limit {self.limit_s:.0f} s)"
        return ""


class HeartbeatFile:
    """The mapped file. The supervisor creates it; ranks and front open it."""

    def __init__(self, path: Path, *, ranks: int = 0) -> None:
        if ranks:
            path.write_bytes(bytes(SLOT_BYTES * ranks))
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    def reset(self, rank: int, limit_s: float) -> None:
        """Start a slot afresh, before its rank is forked: full ages from now on."""
        now = time.monotonic()
        struct.pack_into("dddQ", self._map, rank * SLOT_BYTES, now, now, limit_s, 0)

    def tick_loop(self, rank: int) -> None:
        base = rank * SLOT_BYTES
        (count,) = struct.unpack_from("Q", self._map, base + _COUNT)
        struct.pack_into("Q", self._map, base + _COUNT, count + 1)
        struct.pack_into("d", self._map, base + _LOOP, time.monotonic())

    def tick_process(self, rank: int) -> None:
        struct.pack_into("d", self._map, rank * SLOT_BYTES + _PROCESS, time.monotonic())

    def announce(self, rank: int, limit_s: float) -> None:
        """A phase begins whose loop may be silent for `limit_s`."""
        self.tick_loop(rank)
        struct.pack_into("d", self._map, rank * SLOT_BYTES + _LIMIT, limit_s)

    def read(self, rank: int) -> Beat:
        loop, process, limit, count = struct.unpack_from("dddQ", self._map, rank * SLOT_BYTES)
        now = time.monotonic()
        return Beat(loop_age_s=max(0.0, now - loop), process_age_s=max(0.0, now - process), limit_s=limit, count=count)


def start_process_thread(file: HeartbeatFile, rank: int, interval_s: float = 1.0) -> None:
    """Tick the process stamp from a daemon thread. It proves that the process runs, nothing about the loop."""

    def beat() -> None:
        while True:
            file.tick_process(rank)
            time.sleep(interval_s)

    threading.Thread(target=beat, name="process-heartbeat", daemon=True).start()
