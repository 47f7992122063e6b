"""Cut a growing text at the first of several strings, holding back what may still become one."""

from __future__ import annotations


class StopStrings:
    """Feed text with `push`; what it returns is final. After a match `matched` is the string and nothing more comes out.

    The match that starts earliest wins; of two that start together, the one given first.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns the part that no stop string can reach any more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(at, order) for order, stop in enumerate(self._stops) if (at := self._held.find(stop)) >= 0]
        if found:
            at, order = min(found)
            self.matched = self._stops[order]
            return self._take(at, drop_rest=True)
        return self._take(len(self._held) - self._longest_prefix_at_end())

    def flush(self) -> str:
        """The text has ended: what was held back is final now."""
        return self._take(len(self._held))

    def _take(self, count: int, drop_rest: bool = False) -> str:
        text = self._held[:count]
        self._held = "" if drop_rest else self._held[count:]
        return text

    def _longest_prefix_at_end(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
