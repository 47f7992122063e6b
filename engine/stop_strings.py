"""Cut a growing text at the first of several strings, holding back what may still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text with `push`; what it returns is final. After a match `matched` is the string and nothing more comes out.

    The match that is complete first wins, of those the longest, so that the way in which text arrives changes nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._beginnings = {stop[:size] for stop in self._stops for size in range(1, len(stop))}
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        self.active = bool(self._stops)  # else every text is final at once

    def push(self, text: str) -> str:
        """Add text; returns the part that no stop string can reach any more."""
        if self.matched is not None:
            return ""
        if not self.active:
            return text
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            final, self._held = self._held[:at], ""
            return final
        return self._take(len(self._held) - self._open_end())

    def flush(self) -> str:
        """The text has ended: what was held back is final now."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        final, self._held = self._held[:count], self._held[count:]
        return final

    def _open_end(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        sizes = range(min(self._longest - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if self._held[-size:] in self._beginnings), 0)
