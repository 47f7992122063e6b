"""The compiled twin of `page_map.DictPageMap`: 44 bytes a page, keys included, and nothing that the collector knows. Built on first use."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from csrc.loader import BuildError, Library, bind, build
from hicache.page_map import KEY_BYTES, NONE, PageMap

LIBRARY = Library("page_table", ("host/page_table.cpp",))
_SLOT_BYTES = 8
log = logging.getLogger(__name__)


class NativePageMap:
    """A table of frames by key in memory of its own; see `csrc/host/page_table.cpp`.

    It has three slots for two frames, so that a full arena still finds a page at the second or third look.
    """

    name = "native"

    def __init__(self, num_frames: int, library: ctypes.CDLL) -> None:
        self._num_frames, self._num_pages = num_frames, 0
        self._capacity = num_frames + num_frames // 2 + 1  # never full, or a search would not end
        self._keys = bytearray(KEY_BYTES * num_frames)
        self._slots = array("i", [NONE]) * (2 * self._capacity)
        keys_at = ctypes.addressof(ctypes.c_char.from_buffer(self._keys)) if num_frames else 0
        self._table = (self._slots.buffer_info()[0], self._capacity, keys_at, num_frames)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        table = [pointer, ctypes.c_uint32, pointer, ctypes.c_int32]
        self._match = bind(library, "dix_page_table_match", [*table, ctypes.c_char_p, number, pointer])
        self._insert = bind(library, "dix_page_table_insert", [*table, ctypes.c_char_p, number, pointer])
        self._remove = bind(library, "dix_page_table_remove", [*table, number, pointer])

    def __len__(self) -> int:
        return self._num_pages

    @property
    def num_bytes(self) -> int:
        return len(self._keys) + _SLOT_BYTES * self._capacity

    def match(self, keys: Sequence[bytes]) -> list[int]:
        frames = array("i", bytes(4 * len(keys)))
        found = self._match(*self._table, _joined(keys), len(keys), frames.buffer_info()[0])
        return frames[:found].tolist()

    def insert(self, keys: Sequence[bytes], frames: Sequence[int]) -> None:
        assert len(keys) == len(frames), f"{len(keys)} keys for {len(frames)} frames"
        packed = _packed(frames)
        refused = self._insert(*self._table, _joined(keys), len(keys), packed.buffer_info()[0])
        assert refused == NONE, f"of {len(keys)} pages one is inserted twice, or frame {frames[refused]} is none of {self._num_frames}"
        self._num_pages += len(keys)

    def remove(self, frames: Sequence[int]) -> None:
        packed = _packed(frames)
        absent = self._remove(*self._table, len(packed), packed.buffer_info()[0])
        assert absent == NONE, f"frame {frames[absent]} holds no page"
        self._num_pages -= len(packed)

    def key(self, frame: int) -> bytes:
        return bytes(self._keys[KEY_BYTES * frame : KEY_BYTES * (frame + 1)])

    def frames(self) -> list[int]:
        return [frame for frame in self._slots[1::2] if frame != NONE]


def _packed(frames: Sequence[int]) -> array[int]:
    packed = array("i")
    packed.fromlist(frames if isinstance(frames, list) else list(frames))
    return packed


def _joined(keys: Sequence[bytes]) -> bytes:
    joined = b"".join(keys)
    assert len(joined) == KEY_BYTES * len(keys), f"{len(keys)} keys have {len(joined)} bytes"
    return joined


def open_page_map(build_dir: Path) -> Callable[[int], PageMap] | None:
    """Makes maps for a number of frames; None, with the reason in the log, where the code cannot be built."""
    try:
        # Calls keep the interpreter's lock: they take microseconds, and taking it back costs as much.
        library = ctypes.PyDLL(str(build(LIBRARY, build_dir)))
    except (BuildError, OSError) as error:
        log.info("stored pages are looked up in Python, which takes 160 bytes for each and not 44: %s", error)
        return None
    return lambda num_frames: NativePageMap(num_frames, library)
