"""Heartbeats in a small shared file: one slot per rank and a last one for the front, written by them, read by supervisor and front.

A slot holds two stamps of the system-wide monotonic clock: one by the step loop itself, or the front's event loop (a stale one means a
hung loop), and one by a plain thread (a stale one means a stopped process), the count of loop iterations, how long the present phase
may go without a tick, and how many beats in a row found the loop standing still (`server/stillness.py`).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SLOT_BYTES = 64
_WORDS = SLOT_BYTES // 8  # a slot is eight words of 8 bytes; the first five are used
_LOOP, _PROCESS, _LIMIT, _COUNT, _STILL = range(5)
BEAT_S = 1.0
PROCESS_DEAD_S = 10.0
STILL_BEATS = 10


@dataclass(frozen=True, slots=True)
class Beat:
    """Ages in seconds. `limit_s` bounds `loop_age_s` in the present phase. still: beats in a row for which the loop did nothing."""

    loop_age_s: float
    process_age_s: float
    limit_s: float
    count: int
    still: int = 0

    @property
    def complaint(self) -> str:
        """Why this rank must be taken for hung, or "" while it is fine."""
        if self.silent:
            return f"the process has not run for {self.process_age_s:.0f} s"
        return self.loop_complaint

    @property
    def silent(self) -> bool:
        """The process is stopped, unless it only waits for a processor: see `server.state.wants_to_run`."""
        return self.process_age_s > PROCESS_DEAD_S

    @property
    def loop_complaint(self) -> str:
        if self.loop_age_s > self.limit_s:
            return f"the step loop has not ticked for {self.loop_age_s:.0f} s (limit {self.limit_s:.0f} s)"
        if self.still >= STILL_BEATS:
            return f"the step loop has not ticked for {self.loop_age_s:.0f} s, and the process computes nothing"
        return ""


class HeartbeatFile:
    """The mapped file. The supervisor creates it; ranks and front open it.

    Every word is written in one piece: a writer that cleared it first would show a reader a stamp of 0, which is a hang since boot.
    """

    def __init__(self, path: Path, *, slots: int = 0) -> None:
        if slots:
            path.write_bytes(bytes(SLOT_BYTES * slots))
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapped = memoryview(mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)
        self._stamps = mapped.cast("d")
        self._counts = mapped.cast("Q")

    def reset(self, rank: int, limit_s: float, start_s: float = 0.0) -> None:
        """Start a slot afresh, before its process is forked: full ages from now on. Its first beat may take `start_s` longer."""
        base, now = rank * _WORDS, time.monotonic()
        self._stamps[base + _LIMIT] = limit_s
        self._stamps[base + _LOOP], self._stamps[base + _PROCESS] = now, now + start_s
        self._counts[base + _COUNT] = self._counts[base + _STILL] = 0

    def tick_loop(self, rank: int) -> None:
        self._counts[rank * _WORDS + _COUNT] += 1
        self._stamps[rank * _WORDS + _LOOP] = time.monotonic()

    def tick_process(self, rank: int) -> None:
        self._stamps[rank * _WORDS + _PROCESS] = time.monotonic()

    def tell_still(self, rank: int, beats: int) -> None:
        self._counts[rank * _WORDS + _STILL] = beats

    def announce(self, rank: int, limit_s: float) -> None:
        """A phase begins whose loop may be silent for `limit_s`."""
        self.tick_loop(rank)
        self._stamps[rank * _WORDS + _LIMIT] = limit_s

    def read(self, rank: int) -> Beat:
        base = rank * _WORDS
        loop, process, limit = self._stamps[base : base + 3].tolist()
        now = time.monotonic()
        ages = max(0.0, now - loop), max(0.0, now - process)
        count, still = self._counts[base + _COUNT : base + _STILL + 1].tolist()
        return Beat(loop_age_s=ages[0], process_age_s=ages[1], limit_s=limit, count=count, still=still)


def start_process_thread(file: HeartbeatFile, rank: int, interval_s: float = BEAT_S, look: Callable[[int], int] | None = None) -> None:
    """Tick the process stamp from a daemon thread. It proves that the process runs, nothing about the loop: `look`, given the loop's count,
    says how many beats it has stood still."""

    def beat() -> None:
        while True:
            file.tick_process(rank)
            if look is not None:
                file.tell_still(rank, look(file.read(rank).count))
            time.sleep(interval_s)

    threading.Thread(target=beat, name="process-heartbeat", daemon=True).start()
