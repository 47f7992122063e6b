"""Token ids of stored pages, to prove that a key leads to the page of its own tokens: `hicache.audit=full`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class PageTokens:
    """All ids of every page that was stored since start: 4 bytes a token. Of adopted pages they are not known."""

    def __init__(self, num_frames: int, page_tokens: int) -> None:
        self._size = page_tokens
        self._ids = array("I", [0]) * (num_frames * page_tokens)
        self._known = bytearray(num_frames)

    @property
    def num_bytes(self) -> int:
        return self._ids.itemsize * len(self._ids) + len(self._known)

    def store(self, frames: Sequence[int], tokens: Sequence[int]) -> None:
        """Consecutive pages with these tokens lie in `frames` from now on."""
        size, ids = self._size, array("I", tokens)
        assert len(ids) == size * len(frames), f"{len(ids)} tokens for {len(frames)} pages of {size}"
        for at, frame in enumerate(frames):
            self._ids[size * frame : size * (frame + 1)] = ids[size * at : size * (at + 1)]
            self._known[frame] = 1

    def forget(self, frame: int) -> None:
        """The frame holds a page whose tokens are not known."""
        self._known[frame] = 0

    def differ(self, frame: int, tokens: Sequence[int]) -> bool:
        """Whether the page is known to have other tokens than these."""
        size = self._size
        return self._known[frame] == 1 and self._ids[size * frame : size * (frame + 1)] != array("I", tokens)
