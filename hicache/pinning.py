"""Page-lock the arena for a GPU: touched in parallel, registered in pieces, given back before the process ends.

Never through a framework's allocator: it rounds sizes up to powers of two. Left to the kernel at exit, unpinning stalls for tens of
seconds, hence `close`.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from csrc.loader import bind
from hicache.host_pool import FRAME_ALIGNMENT, HostArena
from hicache.native import check_status

MAX_PIECE_BYTES = 2**30
_TOUCH_THREADS = 16


@dataclass(slots=True)
class PinnedArena:
    """The registered pieces of an arena. `pointer`: the device's address of frame 0. `borders`: first frames of the pieces."""

    arena: HostArena
    library: ctypes.CDLL
    pointer: int = 0
    borders: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Unregister every piece once. Idempotent; call it while the CUDA context lives."""
        unregister = bind(self.library, "dix_host_unregister", [ctypes.c_void_p])
        while self.borders:
            unregister(_address(self.arena, self.borders.pop()))


def pin(arena: HostArena, library: ctypes.CDLL, piece_bytes: int = MAX_PIECE_BYTES) -> PinnedArena:
    """Register the whole arena, blocking.

    Raises:
        MachineError: the driver refuses, or its addresses of the pieces leave gaps.
    """
    touch(arena)
    pinned = PinnedArena(arena, library)
    register = bind(library, "dix_host_register", [ctypes.c_void_p, ctypes.c_size_t])
    device_pointer = bind(library, "dix_host_device_pointer", [ctypes.c_void_p, ctypes.c_void_p])
    step = max(1, piece_bytes // arena.frame_bytes)
    try:
        for first in range(0, arena.num_frames, step):
            frames = min(step, arena.num_frames - first)
            check_status(
                library, register(_address(arena, first), frames * arena.frame_bytes), f"pinning {frames} frames of the host cache"
            )
            pinned.borders.append(first)
            device = ctypes.c_void_p()
            check_status(library, device_pointer(_address(arena, first), ctypes.byref(device)), "device address of the host cache")
            pinned.pointer = pinned.pointer or (device.value or 0)
            expected = pinned.pointer + first * arena.frame_bytes
            assert device.value == expected, f"the device sees frame {first} at {device.value:#x}, not at {expected:#x}"
    except BaseException:
        pinned.close()
        raise
    return pinned


def touch(arena: HostArena, threads: int = _TOUCH_THREADS) -> None:
    """Fault all pages in, from several threads: one thread zeroes about 2 GB/s. Bytes that a former owner left are only read."""
    pieces = min(threads, os.cpu_count() or 1)
    step = -(-arena.num_frames // pieces)

    def fault_in(first: int) -> None:
        if arena.inherited:
            arena.rows[first : first + step].view(-1)[::FRAME_ALIGNMENT].sum()
        else:
            ctypes.memset(_address(arena, first), 0, _length(arena, first, step))

    with ThreadPoolExecutor(pieces) as pool:
        list(pool.map(fault_in, range(0, arena.num_frames, step)))


def _address(arena: HostArena, frame: int) -> int:
    return arena.rows.data_ptr() + frame * arena.frame_bytes


def _length(arena: HostArena, first: int, frames: int) -> int:
    return min(frames, arena.num_frames - first) * arena.frame_bytes
