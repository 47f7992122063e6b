"""Stop strings in the answer: the text up to the first match, with the tokens that it came from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.stop_strings import StopStrings


class StopStage:
    """Feed text with the tokens that begin in it; what comes back can be shown. Matching is `StopStrings`."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._strings = StopStrings(stops)
        # (position behind the text given back so far, token index); a token is shown together with its first character.
        self._tokens: deque[tuple[int, int]] = deque()
        self._held = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._strings.matched

    def push(self, text: str, tokens: Sequence[tuple[int, int]] = ()) -> tuple[str, list[int]]:
        """text: new content. tokens: (position in `text`, token index), ascending. Returns (final text, indexes of its tokens)."""
        if not self._strings.active:
            return text, [index for _, index in tokens]
        if self.matched is not None:
            return "", []
        self._tokens.extend((self._held + position, index) for position, index in tokens)
        final = self._strings.push(text)
        self._held += len(text) - len(final)
        return final, self._release(len(final), everything=self._held == 0)

    def flush(self) -> tuple[str, list[int]]:
        """The content has ended: what was held back did not become a match."""
        final = self._strings.flush()
        self._held = 0
        return final, self._release(len(final), everything=self.matched is None)

    def _release(self, count: int, everything: bool) -> list[int]:
        indexes = []
        while self._tokens and (everything or self._tokens[0][0] < count):
            indexes.append(self._tokens.popleft()[1])
        self._tokens = deque((position - count, index) for position, index in self._tokens)
        return indexes
