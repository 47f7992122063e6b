"""Faults on purpose: changed bytes in the arena, and copies that are lost, cut short or late. For tests and debug servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from engine.errors import ConfigError
from hicache.audit import EXPONENT_BYTE, flip_bytes
from hicache.errors import MachineError
from hicache.host_cache import HostCache
from hicache.host_pool import HostArena
from hicache.index import NONE, StateReason
from hicache.transfer import Transfer

COPY_FAULTS = ("drop", "short", "delay", "refuse")
_ORDINARY = (0x30, 0x3E)  # high bytes, without the sign, of magnitudes from about 5e-10 to 0.5


class FaultyTransfer:
    """A transfer whose next copies can be lost (`drop`), cut to half a row (`short`), made late (`delay`) or fail (`refuse`)."""

    def __init__(self, inner: Transfer) -> None:
        self._inner, self.name = inner, inner.name
        self._kind, self._left, self._seconds = "", 0, 0.0

    def arm(self, kind: str, count: int, seconds: float) -> dict[str, Any]:
        """Spoil the next `count` copies: stores for drop and short, restores for delay, both for refuse. Returns what is in force.

        Raises:
            ConfigError: unknown kind.
        """
        if kind not in COPY_FAULTS:
            raise ConfigError(f"fault {kind!r} is unknown", hint=f"choose one of: flip, {', '.join(COPY_FAULTS)}")
        self._kind, self._left, self._seconds = kind, count, seconds
        return {"kind": kind, "count": count, "seconds": seconds}

    def _spoils(self, *kinds: str) -> bool:
        if self._left == 0 or self._kind not in kinds:
            return False
        self._left -= 1
        return True

    def copy_in(self, frames: Sequence[int], device: Tensor, rows: Sequence[int]) -> None:
        self._may_refuse()
        if self._spoils("delay"):
            time.sleep(self._seconds)
        self._inner.copy_in(frames, device, rows)

    def _may_refuse(self) -> None:
        if self._spoils("refuse"):
            raise MachineError("a copy was refused on purpose", hint="fault injection")

    def copy_out(self, device: Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        self._may_refuse()
        if self._spoils("drop", "short"):
            if self._kind == "drop":
                return
            device = device[:, : device.shape[1] // 2]
        self._inner.copy_out(device, rows, frames)


def flip(
    cache: HostCache, arena: HostArena, row_bytes: int, state_bytes: int, target: str, page: int, byte: int | None, count: int
) -> dict[str, Any]:
    """Flip bytes of a stored page or state where a follow-up would resume: at the most recent `resend` state.

    target: "page" or "state". page: index on that state's path, from the root, or from the restore point when negative. byte: offset
    of the first of `count` neighbouring bytes; without one, exponent bytes whose flip makes a value huge. Returns what changed.

    Raises:
        ConfigError: nothing is stored yet, or an argument is out of range.
    """
    index = cache.index
    state = index.states.newest(StateReason.RESEND)
    if state == NONE:
        raise ConfigError("no window state is stored yet", hint="send a prompt of several pages first")
    path = index.path_to(index.parent[state])
    if target not in ("page", "state") or not -len(path) <= page < len(path):
        raise ConfigError(f"fault target {target!r}, page {page}", hint=f"target page or state, page in [{-len(path)}, {len(path) - 1}]")
    frame = path[page] if target == "page" else state
    length = row_bytes if target == "page" else min(state_bytes, arena.frame_bytes)
    if not 1 <= count <= length // 4 or not 0 <= (byte or 0) < length:
        raise ConfigError(f"byte {byte}, count {count} do not fit {length} bytes", hint=f"byte below {length}, count in [1, {length // 4}]")
    stride = arena.frame_bytes
    row = bytes(arena.memory[frame * stride : frame * stride + length])
    # The oldest row of a window is visible to no later token, so a state is damaged from the end of its first frame backwards.
    offsets = [(byte + i) % length for i in range(count)] if byte is not None else vulnerable_bytes(row, count, from_end=target == "state")
    flips = flip_bytes(arena, frame, offsets)
    return {
        "kind": "flip",
        "target": target,
        "frame": frame,
        "page": page % len(path),
        "position": index.position[frame],
        "flips": [asdict(change) for change in flips],
    }


def vulnerable_bytes(row: bytes, count: int, *, from_end: bool) -> list[int]:
    """Offsets of `count` high bytes of fp32 or bf16 values of ordinary size, which one flipped bit makes huge but finite; any high
    bytes when there are too few of those.
    """
    high = range(EXPONENT_BYTE, len(row), 4)
    ordinary = [at for at in (reversed(high) if from_end else high) if _ORDINARY[0] <= row[at] & 0x7F <= _ORDINARY[1]]
    return ordinary[:count] if len(ordinary) >= count else list(high[:count])
