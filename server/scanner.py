"""Finds markers in text that arrives in pieces, in linear time: every character is looked at a bounded number of times."""

from __future__ import annotations

import re
from functools import lru_cache


class Markers:
    """A set of strings to look for. Where two begin together the longer one wins.

    With a marker inside another one, what is found depends on how the text arrives: the inner one may be complete first.
    """

    def __init__(self, *markers: str) -> None:
        self.markers = tuple(sorted(markers, key=len, reverse=True))
        self._pattern = re.compile("|".join(re.escape(marker) for marker in self.markers)) if markers else None
        self._prefixes = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))
        self._starts = frozenset(marker[0] for marker in markers)
        self._longest = max(map(len, markers), default=0)

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Position and marker of the first one at or behind `start`."""
        match = self._pattern.search(text, start) if self._pattern is not None else None
        return (match.start(), match.group()) if match is not None else None

    def overlap(self, text: str, start: int) -> int:
        """Length of the longest end of `text[start:]` that could still grow into a marker."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._starts and text[at:] in self._prefixes:
                return len(text) - at
        return 0


@lru_cache(maxsize=256)
def markers(*spellings: str) -> Markers:
    """The same object for the same strings: parsers are made per choice, their markers belong to the format."""
    return Markers(*spellings)


class Scanner:
    """A growing text that is consumed from the front. Offsets count from the very first character."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._base = 0

    @property
    def offset(self) -> int:
        """Where the unconsumed text begins."""
        return self._base + self._position

    @property
    def end(self) -> int:
        """Where the next pushed character will stand."""
        return self._base + len(self._text)

    def push(self, text: str) -> None:
        # What is left is shorter than a marker, so that this copy stays small.
        self._base += self._position
        self._text = self._text[self._position :] + text
        self._position = 0

    def until(self, markers: Markers) -> tuple[str, str]:
        """Consume up to and including the next marker. Returns (text before it, marker).

        Without a marker everything that cannot begin one is consumed, and the marker is "".
        """
        found = markers.find(self._text, self._position)
        if found is None:
            stop = len(self._text) - markers.overlap(self._text, self._position)
            text, self._position = self._text[self._position : stop], stop
            return text, ""
        start, marker = found
        text, self._position = self._text[self._position : start], start + len(marker)
        return text, marker

    def rest(self) -> str:
        """Consume what is left."""
        text, self._position = self._text[self._position :], len(self._text)
        return text
