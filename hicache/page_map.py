"""Which frame holds the page of a key, and which key a frame holds. Two implementations that agree: see `native_page_map`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from struct import Struct
from typing import Protocol

KEY_BYTES = 32
NONE = -1
_KEY = Struct(f"{KEY_BYTES}s")  # reads a key out of the buffer in one allocation


class PageMap(Protocol):
    """Page keys of `KEY_BYTES` bytes, at most one per frame."""

    name: str

    def __len__(self) -> int:
        """Number of pages."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes now."""

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Frames of the leading keys that are present."""

    def insert(self, keys: Sequence[bytes], frames: Sequence[int]) -> None:
        """Add different keys for frames that hold none. Raises AssertionError: one of them is present."""

    def remove(self, frames: Sequence[int]) -> None:
        """Forget the keys of frames that hold one. `key` still tells them. Raises AssertionError: one of them holds none."""

    def key(self, frame: int) -> bytes:
        """The key that was last inserted for a frame."""

    def frames(self) -> list[int]:
        """Frames that hold a page, in no order."""


class DictPageMap:
    """The obvious one: a dictionary. 160 bytes a page, since every key and every number is an object."""

    name = "python"

    def __init__(self, num_frames: int) -> None:
        # Keys by frame lie in one buffer: a list of 600,000 of them is a list that the collector walks.
        self._keys = bytearray(KEY_BYTES * num_frames)
        self._frames: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def num_bytes(self) -> int:
        each = sys.getsizeof(bytes(KEY_BYTES)) + sys.getsizeof(len(self._keys))
        return len(self._keys) + sys.getsizeof(self._frames) + each * len(self._frames)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        path: list[int] = []
        get, append = self._frames.get, path.append
        for key in keys:
            frame = get(key)
            if frame is None:
                break
            append(frame)
        return path

    def insert(self, keys: Sequence[bytes], frames: Sequence[int]) -> None:
        assert self._frames.keys().isdisjoint(keys), f"of {len(keys)} pages one is inserted twice"
        stored = self._keys
        for key, frame in zip(keys, frames, strict=True):
            stored[KEY_BYTES * frame : KEY_BYTES * (frame + 1)] = key
        self._frames.update(zip(keys, frames, strict=True))

    def remove(self, frames: Sequence[int]) -> None:
        pop, key_at, stored = self._frames.pop, _KEY.unpack_from, self._keys
        for frame in frames:
            found = pop(key_at(stored, KEY_BYTES * frame)[0], NONE)
            assert found == frame, f"frame {frame} holds no page"

    def key(self, frame: int) -> bytes:
        key: bytes = _KEY.unpack_from(self._keys, KEY_BYTES * frame)[0]
        return key

    def frames(self) -> list[int]:
        return list(self._frames.values())
