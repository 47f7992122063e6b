"""Refuses requests that were running on a rank both times it crashed, before they crash it a third time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from engine.request import Request
from server.errors import BadRequest

MAX_CRASHES = 2
FORGET_S = 600.0  # as long as the restart policy remembers
MAX_REMEMBERED = 4096


def fingerprint(prompt: bytes, request: Request) -> bytes:
    """What makes two requests the same to an engine: the prompt (as its hash), how it is sampled, and the grammar."""
    settings = msgspec.msgpack.encode((request.params, request.grammar))
    return blake2b(prompt + settings, digest_size=16).digest()


@dataclass(slots=True)
class Poison:
    """Counts crashes per fingerprint. A request that ends well is acquitted, the others are after ten minutes."""

    clock: Callable[[], float] = time.monotonic
    _crashes: OrderedDict[bytes, tuple[int, float]] = field(default_factory=OrderedDict)

    def blame(self, fingerprints: Iterable[bytes]) -> None:
        """A rank crashed by itself while these were on it."""
        for name in set(fingerprints):
            count, at_s = self._crashes.pop(name, (0, 0.0))
            now = self.clock()
            self._crashes[name] = (count + 1 if now - at_s < FORGET_S else 1, now)
        while len(self._crashes) > MAX_REMEMBERED:
            self._crashes.popitem(last=False)

    def acquit(self, name: bytes) -> None:
        self._crashes.pop(name, None)

    def check(self, name: bytes) -> None:
        """Raises BadRequest `poison_request`."""
        count, at_s = self._crashes.get(name, (0, 0.0))
        if count >= MAX_CRASHES and self.clock() - at_s < FORGET_S:
            raise BadRequest(None, f"this request was running each of the {count} times an engine process crashed", "poison_request")
