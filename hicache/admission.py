"""Which pages are worth storing, all or only those seen before, and which prompts are large one-off ones that are evicted first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_SLOTS_BITS = 16
_TAG_BYTES = 8
_MOST_LARGE = 1024  # large prompts that are remembered


class KeySketch:
    """How often page keys were seen, for about the last 65,536 of them. A key has one slot, which the latest of those that share it
    holds; keys are digests, so that their bytes choose slots evenly."""

    def __init__(self) -> None:
        self._tags = array("Q", [0]) * (1 << _SLOTS_BITS)
        self._sights = bytearray(1 << _SLOTS_BITS)

    def see(self, key: bytes) -> None:
        """One more request with that page."""
        slot, tag = self._place(key)
        if self._tags[slot] != tag:
            self._tags[slot], self._sights[slot] = tag, 0
        self._sights[slot] = min(255, self._sights[slot] + 1)

    def sights(self, key: bytes) -> int:
        slot, tag = self._place(key)
        return self._sights[slot] if self._tags[slot] == tag else 0

    @staticmethod
    def _place(key: bytes) -> tuple[int, int]:
        return int.from_bytes(key[:2], "little"), int.from_bytes(key[2 : 2 + _TAG_BYTES], "little") | 1


class AdmissionPolicy:
    """Stores a page from its `threshold`-th sight on. 1 stores everything and remembers nothing."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._sketch = KeySketch() if threshold > 1 else None

    def see(self, keys: Sequence[bytes]) -> None:
        """A request with these pages came: once per request, and before it stores any of them."""
        if self._sketch is not None:
            for key in keys:
                self._sketch.see(key)

    def admits(self, keys: Sequence[bytes]) -> int:
        """How many of consecutive absent pages are to be stored: those in front of the first that was not seen often enough."""
        if self._sketch is None:
            return len(keys)
        sights, threshold = self._sketch.sights, self._threshold
        return next((i for i, key in enumerate(keys) if sights(key) < threshold), len(keys))


class LargePrompts:
    """Ghost entries of large prompts: one key each, which outlives the pages. A large prompt that comes again is no one-off one; were it
    always put last, two that come in turn would push each other out for ever.

    most_pages: a prompt with more new ones is large. It is known by page number `most_pages`, so that others with the same beginning of
    that length count as the same.
    """

    def __init__(self, most_pages: float) -> None:
        self._most_pages = most_pages
        self._seen: dict[bytes, None] = {}

    def num_known(self, keys: Sequence[bytes], num_stored: int) -> int:
        """A prompt comes, once per request: how many of its leading pages are known, of which `num_stored` are stored somewhere."""
        if len(keys) - num_stored <= self._most_pages:
            return num_stored
        key = keys[int(self._most_pages)]
        known = key in self._seen
        self._seen.pop(key, None)
        self._seen[key] = None
        if len(self._seen) > _MOST_LARGE:
            del self._seen[next(iter(self._seen))]
        return len(keys) if known else num_stored
