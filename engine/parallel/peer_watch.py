"""Finds ranks of other hosts that vanish without a word: heart-beats through the store of the rendezvous.

A call to a store whose host is cut off never returns, whatever its timeout says, so a second thread watches the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from engine.distributed import first_line

BEAT_S = 1.0
LOST_S = 10.0


class Store(Protocol):
    """The part of torch's TCPStore that beats need. Its calls raise RuntimeError when the host that serves it is gone."""

    def set(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class PeerWatch:
    """Beats for one rank and watches the others from threads of its own. `on_lost` is called once, in one of them, with the reason."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        on_lost: Callable[[str], None],
        *,
        beat_s: float = BEAT_S,
        lost_s: float = LOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Every rank must have beaten once (`beat`) before anybody watches: a missing key would block."""
        self._store, self._rank, self._on_lost = store, rank, on_lost
        self._keys = [f"beat/{peer}" for peer in range(size)]
        self._beat_s, self._lost_s, self._clock = beat_s, lost_s, clock
        self._count = 0
        self._answered_s = clock()
        self._stop = threading.Event()
        self._reporting = threading.Lock()
        self._seen: list[tuple[bytes, float]] = []
        self.beat()

    def start(self) -> None:
        self._answered_s = self._clock()
        for name, run in (("peer-watch", self._run), ("peer-watch-guard", self._guard)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def beat(self) -> None:
        self._count += 1
        self._store.set(self._keys[self._rank], str(self._count))

    def find_lost(self) -> str:
        """Who has not beaten for too long, "" when all have."""
        now = self._clock()
        values = self._store.multi_get(self._keys)
        seen = self._seen or [(value, now) for value in values]
        self._seen = [old if old[0] == value else (value, now) for old, value in zip(seen, values, strict=True)]
        late = [peer for peer, (_, since) in enumerate(self._seen) if now - since > self._lost_s and peer != self._rank]
        return f"rank {late[0]} has not been heard of for {self._lost_s:g} s" if late else ""

    def _run(self) -> None:
        while not self._stop.wait(self._beat_s):
            try:
                self.beat()
                lost = self.find_lost()
            except (RuntimeError, ValueError) as error:
                lost = f"the host of rank 0 does not answer: {first_line(error)}"
            self._answered_s = self._clock()
            if lost:
                self._report(lost)

    def _guard(self) -> None:
        while not self._stop.wait(self._beat_s):
            if self._clock() - self._answered_s > self._lost_s:
                self._report(f"the host of rank 0 has not answered for {self._lost_s:g} s")

    def _report(self, reason: str) -> None:
        with self._reporting:
            if not self._stop.is_set():
                self._stop.set()
                self._on_lost(reason)
