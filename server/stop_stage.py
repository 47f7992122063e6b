"""Stop strings in the answer: the text up to the first match, with the tokens that it came from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from server.scanner import Markers


class StopStage:
    """Feed text with the tokens that begin in it; what comes back can be shown.

    The match that is complete first wins, of those the longest, so that the way in which text arrives changes nothing.
    After a match `matched` names the string and nothing more comes out.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.matched: str | None = None
        self._stops = tuple(stop for stop in stops if stop)
        self._markers = Markers(*self._stops)
        self._held = ""
        # (position in the held text, token index); a token is shown together with its first character.
        self._tokens: deque[tuple[int, int]] = deque()

    def push(self, text: str, tokens: Sequence[tuple[int, int]] = ()) -> tuple[str, list[int]]:
        """text: new content. tokens: (position in `text`, token index), ascending. Returns (final text, indexes of its tokens)."""
        if self.matched is not None:
            return "", []
        if not self._stops:
            return text, [index for _, index in tokens]
        self._tokens.extend((len(self._held) + position, index) for position, index in tokens)
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            return self._release(at)
        return self._release(len(self._held) - self._markers.overlap(self._held, 0))

    def flush(self) -> tuple[str, list[int]]:
        """The content has ended: what was held back did not become a match."""
        return self._release(len(self._held))

    def _release(self, count: int) -> tuple[str, list[int]]:
        text, self._held = self._held[:count], self._held[count:]
        indexes = []
        while self._tokens and (self._tokens[0][0] < count or not self._held):
            indexes.append(self._tokens.popleft()[1])
        self._tokens = deque((position - count, index) for position, index in self._tokens)
        return text, indexes
