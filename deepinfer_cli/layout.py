"""Fits a table into a narrow terminal: words wrap first, then columns continue in further blocks below. Nothing is left out or cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GAP = 2
LEAST_WORDS = 24  # a column of words wraps down to this width, or to its longest word


@dataclass(frozen=True, slots=True)
class Extent:
    """One column's widths in characters: what it takes on one line, and the least it can do with."""

    full: int
    least: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a column of the table goes within its block."""

    column: int
    width: int


def extent(cells: Sequence[str], *, words: bool, wide: Callable[[str], int] = len) -> Extent:
    """cells: head and values of one column. words: it may wrap at blanks; numbers never do. wide: a text's width in a terminal."""
    full = max(map(wide, cells), default=0)
    if not words:
        return Extent(full, full)
    longest = max((wide(word) for cell in cells for word in cell.split()), default=0)
    return Extent(full, min(full, max(longest, LEAST_WORDS)))


def blocks(extents: Sequence[Extent], room: int) -> list[list[Placed]]:
    """Columns in as few blocks as fit `room`. Every block begins with column 0, which says what a row is about.

    A block whose first two columns alone are too wide stays as it is: a terminal that folds a line loses nothing.
    """
    found, current = [], [0]
    for column in range(1, len(extents)):
        if len(current) > 1 and _least(extents, [*current, column]) > room:
            found.append(current)
            current = [0]
        current.append(column)
    return [_shared(extents, block, room) for block in [*found, current] if extents]


def _least(extents: Sequence[Extent], columns: Sequence[int]) -> int:
    return sum(extents[column].least for column in columns) + GAP * (len(columns) - 1)


def _shared(extents: Sequence[Extent], columns: Sequence[int], room: int) -> list[Placed]:
    """What room is left goes to columns that would wrap, from the left."""
    spare, placed = max(0, room - _least(extents, columns)), []
    for column in columns:
        more = min(spare, extents[column].full - extents[column].least)
        spare -= more
        placed.append(Placed(column, extents[column].least + more))
    return placed
