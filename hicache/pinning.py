"""Page-lock the arena for a GPU: bound to its memory node, touched in parallel, registered in slices, given back before the end.

Never through a framework's allocator: it rounds sizes up to powers of two. Left to the kernel at exit, unpinning stalls for tens of
seconds, hence `close`. Only the first slice is registered before the server is ready; the rest follows on one thread, in slices small
enough not to slow the steps beside it, and its frames join the free ones as they come.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from csrc.loader import bind
from hicache.errors import MachineError
from hicache.host_pool import FRAME_ALIGNMENT, HostArena
from hicache.native import check_status

MAX_PIECE_BYTES = 2**30
_TOUCH_THREADS = 16
_BACKGROUND_THREADS = 4
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PinnedArena:
    """The registered slices of an arena. `pointer`: the device's address of frame 0. `borders`: first frames of all slices.

    The background thread only registers and appends to `_fresh`; everything else belongs to the engine's thread.
    """

    arena: HostArena
    library: ctypes.CDLL
    borders: list[int]
    device: torch.device | None = None  # threads begin with the first one
    cpus: Sequence[int] = ()
    pointer: int = 0
    _registered: list[range] = field(default_factory=list)  # frames of the slices, ascending
    _fresh: deque[range] = field(default_factory=deque)
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def num_bytes(self) -> int:
        """Bytes that the device can address."""
        return (self._registered[-1].stop if self._registered else 0) * self.arena.frame_bytes

    def take_fresh(self) -> list[range]:
        """Frames that became usable since the last call."""
        fresh = []
        while self._fresh:
            fresh.append(self._fresh.popleft())
        return fresh

    def register(self, first: int, touch_threads: int = _TOUCH_THREADS) -> None:
        """Touch and register the slice that begins at frame `first`.

        Raises:
            MachineError: the driver refuses, or its addresses of the slices leave gaps.
        """
        frames = self._slice(first)
        touch(self.arena, frames, touch_threads, self.cpus)
        address = _address(self.arena, first)
        register = bind(self.library, "dix_host_register", [ctypes.c_void_p, ctypes.c_size_t])
        status = register(address, len(frames) * self.arena.frame_bytes)
        check_status(self.library, status, f"pinning {len(frames)} frames of the host cache")
        self._registered.append(frames)
        device = ctypes.c_void_p()
        device_pointer = bind(self.library, "dix_host_device_pointer", [ctypes.c_void_p, ctypes.c_void_p])
        check_status(self.library, device_pointer(address, ctypes.byref(device)), "device address of the host cache")
        seen = device.value or 0
        self.pointer = self.pointer or seen - first * self.arena.frame_bytes
        expected = self.pointer + first * self.arena.frame_bytes
        if seen != expected:
            raise MachineError(
                f"the device sees frame {first} of the host cache at {seen:#x}, not at {expected:#x}",
                hint="--set hicache.pin=never, or --hicache-size-gb 0",
            )

    def register_rest(self) -> None:
        """Begin to register the remaining slices on a thread of its own."""
        rest = self.borders[len(self._registered) :]
        if rest:
            self._thread = threading.Thread(target=self._register_all, args=(rest,), name="hicache-pin", daemon=True)
            self._thread.start()

    def _register_all(self, rest: list[int]) -> None:
        began = time.monotonic()
        for first in rest:
            if self._stop.is_set():
                return
            try:
                with nullcontext() if self.device is None else torch.cuda.device(self.device):
                    self.register(first, _BACKGROUND_THREADS)
            except MachineError as error:
                log.warning("the host cache stays at %.1f GiB: %s (%s)", self.num_bytes / 2**30, error, error.hint)
                return
            self._fresh.append(self._slice(first))
        seconds = time.monotonic() - began
        log.info("host cache pinned: %.1f GiB, the last %d slices in %.1f s", self.num_bytes / 2**30, len(rest), seconds)

    def _slice(self, first: int) -> range:
        at = self.borders.index(first) + 1
        return range(first, self.borders[at] if at < len(self.borders) else self.arena.num_frames)

    def close(self) -> None:
        """Unregister every slice once. Idempotent; call it while the CUDA context lives."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        unregister = bind(self.library, "dix_host_unregister", [ctypes.c_void_p])
        while self._registered:
            unregister(_address(self.arena, self._registered.pop().start))


def pin(
    arena: HostArena,
    library: ctypes.CDLL,
    piece_bytes: int = MAX_PIECE_BYTES,
    *,
    background: bool = False,
    device: torch.device | None = None,
    cpus: Sequence[int] = (),
) -> PinnedArena:
    """Register the arena for the current device: all of it, or with `background` its first slice, the rest by `register_rest`.

    cpus: those near the device's memory node, to touch pages from.

    Raises:
        MachineError: the driver refuses, or its addresses of the slices leave gaps.
    """
    step = max(1, piece_bytes // arena.frame_bytes)
    pinned = PinnedArena(arena, library, list(range(0, arena.num_frames, step)), device, cpus)
    try:
        for first in pinned.borders[:1] if background else pinned.borders:
            pinned.register(first)
    except BaseException:
        pinned.close()
        raise
    return pinned


def touch(arena: HostArena, frames: range, threads: int = _TOUCH_THREADS, cpus: Sequence[int] = ()) -> None:
    """Fault frames in, from several threads: one thread zeroes about 2 GB/s. Bytes that a former owner left are only read."""
    pieces = min(threads, os.cpu_count() or 1)
    step = -(-len(frames) // pieces)

    def fault_in(first: int) -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # of this thread, which ends with the pool
        count = min(step, frames.stop - first)
        if arena.inherited:
            arena.rows[first : first + count].view(-1)[::FRAME_ALIGNMENT].sum()
        else:
            ctypes.memset(_address(arena, first), 0, count * arena.frame_bytes)

    with ThreadPoolExecutor(pieces) as pool:
        list(pool.map(fault_in, range(frames.start, frames.stop, step)))


def _address(arena: HostArena, frame: int) -> int:
    return arena.rows.data_ptr() + frame * arena.frame_bytes
