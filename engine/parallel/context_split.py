"""How several ranks divide the tokens of prompts among them: equal shares of causal work, and the row numbers that follow from it.

The q new tokens of every sequence are cut into 2 * cp pieces of equal size. Rank r computes piece r and piece 2 * cp - 1 - r: a token near
the beginning sees few keys and one near the end sees many, so every rank has the same work. Pure index arithmetic on the host.
Source: `engine` 12 (zig-zag split).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
PAD = -1


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """Rows of one batch over `cp` ranks. A rank's layout has, for each sequence, its first piece and then the mirrored one.

    mirror: [cp, L] batch row of each local row, PAD where a piece reaches beyond its sequence. reverse: [T] place of each batch row in
    the layouts of all ranks one after the other, rank * L + local row. seq: [L] sequence of each local row, the same on all ranks.
    """

    mirror: Ints
    reverse: Ints
    seq: Ints

    @property
    def cp(self) -> int:
        return self.mirror.shape[0]

    @property
    def local_len(self) -> int:
        """L: rows of a layout, padding included."""
        return self.mirror.shape[1]

    def rows(self, rank: int) -> Ints:
        """Batch rows that a rank computes, in local order and without padding: ascending."""
        local = self.mirror[rank]
        return local[local != PAD]


def split_context(lens: Sequence[int] | Ints, cp: int) -> ContextSplit:
    """lens: new tokens of each sequence of a batch, whose rows lie back to back."""
    count = np.asarray(lens, dtype=np.int64)
    size = piece_tokens(count, cp)
    begins = np.cumsum(count) - count
    seq = np.repeat(np.arange(len(count)), 2 * size)
    within = np.arange(len(seq)) - np.repeat(np.cumsum(2 * size) - 2 * size, 2 * size)
    second, offset = np.divmod(within, np.maximum(size[seq], 1))
    ranks = np.arange(cp)[:, None]
    piece = np.where(second[None, :] == 0, ranks, 2 * cp - 1 - ranks)
    token = piece * size[seq] + offset
    mirror = np.where(token < count[seq], begins[seq] + token, PAD)
    reverse = np.zeros(int(count.sum()), dtype=np.int64)
    real = mirror != PAD
    reverse[mirror[real]] = np.arange(mirror.size).reshape(mirror.shape)[real]
    return ContextSplit(mirror, reverse, seq)


def piece_tokens(lens: Ints, cp: int) -> Ints:
    """Tokens of a piece of each sequence: q / (2 * cp), rounded up."""
    return -(-lens // (2 * cp))


def pieces_of(rank: int, lens: Ints, cp: int) -> Ints:
    """[P, 3] the pieces of a rank that have tokens, in the order of its layout: sequence, first token among the new ones, tokens."""
    size = piece_tokens(lens, cp)[:, None]
    begin = np.array([rank, 2 * cp - 1 - rank]) * size
    count = np.clip(lens[:, None] - begin, 0, size)
    seq = np.broadcast_to(np.arange(len(lens))[:, None], count.shape)
    return np.stack((seq, begin, count), 2)[count > 0]


def key_ranges(split: ContextSplit, rank: int, lens: Ints, key_lens: Ints, ratio: int) -> tuple[Ints, Ints]:
    """[start, end) of the entries that each of a rank's rows sees, in key segments that lie back to back, one per sequence.

    key_lens: tokens of each sequence with the new ones. A segment has max(1, key_len // ratio) entries; a row sees those whose last
    token is not behind its own. Rows as in `split.rows(rank)`.
    """
    segment = np.maximum(1, key_lens // ratio)
    starts = np.cumsum(segment) - segment
    rows = split.rows(rank)
    seq = split.seq[split.mirror[rank] != PAD]
    token = rows - (np.cumsum(lens) - lens)[seq]
    start = starts[seq]
    return start, start + (key_lens[seq] - lens[seq] + token + 1) // ratio
