"""The ranks' prefix indexes, which the front reads from the ranks' shared memory.

Nothing is modelled: a page that a rank evicted is gone here with the next lookup. Ranks whose arena is private, off, or on another host
cannot be asked; the router then goes by what it sent there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from hicache.keys import KeySpace
from hicache.published import PublishedIndex
from hicache.segment import SegmentRefused, open_published
from server.prompt_keys import BLOCK, PromptKeys

log = logging.getLogger("front")


class RankIndexes:
    """One table per rank that can be asked. Made anew for every incarnation of ranks; not thread-safe, but `space` may be read anywhere."""

    def __init__(self, space: KeySpace, tables: dict[int, PublishedIndex], *, shared: bool) -> None:
        self.space, self.shared = space, shared
        self._tables = tables

    @staticmethod
    def open(space: KeySpace, paths: Mapping[int, Path], *, shared: bool) -> RankIndexes:
        """Open the segments that exist. Reading a large one that outlived its rank takes a second or two."""
        tables = {}
        for rank, path in paths.items():
            try:
                tables[rank] = PublishedIndex(open_published(path, space.proof))
            except (SegmentRefused, OSError) as error:
                log.info("rank %d's prefix index cannot be read, the router goes by what it sent there: %s", rank, error)
        return RankIndexes(space, tables, shared=shared)

    def __len__(self) -> int:
        return len(self._tables)

    def tokens(self, keys: PromptKeys, most_tokens: int) -> dict[int, int]:
        """Leading tokens of a prompt that each rank could restore from its own arena."""
        epochs = {rank: table.segment.epoch for rank, table in self._tables.items()}
        newest = max(epochs.values(), default=0)
        if newest != self.space.epoch:
            self.space.resume(newest)  # the caches were reset: prompts hashed from now on may match again
        if not keys.paged:
            return {}
        found = {}
        for rank, table in self._tables.items():
            table.refresh()
            found[rank] = table.find(keys.chain[1:], most_tokens // BLOCK)[0] * BLOCK
        return found
