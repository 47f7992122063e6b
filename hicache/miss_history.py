"""Why a prompt restores nothing although it came before: its prefill was cut off, or it is stored under another salt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hicache.policy import Miss

MOST_REMEMBERED = 4096
V = TypeVar("V")


class MissHistory:
    """What would have been there, in bounded memory. `find`: whether a page is stored.

    Other salts are looked for within one `scope` only, and a request without a scope is told of none: who may not hit a prefix must not
    learn either that others have sent it.
    """

    def __init__(self, find: Callable[[bytes], bool]) -> None:
        self._find = find
        self._cut_off: dict[bytes, None] = {}  # keys of the pages at whose end an aborted prefill would have left a state
        self._first_pages: dict[bytes, bytes] = {}  # first page under its scope's salt -> under the salt that stored it last

    def cut_off(self, keys: Iterable[bytes]) -> None:
        """A prefill ended before it came to the states at these pages."""
        for key in keys:
            _remember(self._cut_off, key, None)

    def state_stored(self, key: bytes) -> None:
        """There is a state at the end of that page now."""
        self._cut_off.pop(key, None)

    def prompt_stored(self, scoped: bytes, first: bytes) -> None:
        """The first page of a prompt is stored under the key `first`; under its scope's own salt it would be `scoped`."""
        _remember(self._first_pages, scoped, first)

    def refine(self, miss: Miss, keys: Sequence[bytes], scoped: bytes | None) -> Miss:
        """The reason behind a miss. keys: of the pages that could have been restored. scoped: see `prompt_stored`; None without one."""
        if miss not in (Miss.NO_PAGE, Miss.NO_STATE):
            return miss
        if self._cut_off and any(key in self._cut_off for key in keys):
            return Miss.ABORTED
        other = self._first_pages.get(scoped) if scoped is not None else None
        if miss is Miss.NO_PAGE and other is not None and other != keys[0] and self._find(other):
            return Miss.TENANT
        return miss


def _remember(table: dict[bytes, V], key: bytes, value: V) -> None:
    """The latest entries stay."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MOST_REMEMBERED:
        del table[next(iter(table))]
