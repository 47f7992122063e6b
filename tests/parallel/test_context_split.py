"""The zig-zag split: index arrays against a direct expansion, equal causal work, rows gathered from all ranks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parallel.context_split import PAD, key_ranges, piece_tokens, pieces_of, split_context
from engine.parallel.row_gather import RowGather
from tests.parallel.thread_tensors import ThreadTensors

LENS = st.lists(st.integers(0, 70), max_size=12)
CP = st.sampled_from([1, 2, 4, 8])


def expand(lens: list[int], cp: int, rank: int) -> list[int]:
    """A rank's layout, written out: for each sequence piece `rank`, then the mirrored one, PAD behind the sequence's end."""
    layout, begin = [], 0
    for count in lens:
        size = -(-count // (2 * cp))
        for piece in (rank, 2 * cp - 1 - rank):
            layout += [begin + i if i < count else PAD for i in range(piece * size, (piece + 1) * size)]
        begin += count
    return layout


@settings(max_examples=150, deadline=None)
@given(LENS, CP)
def test_mirror_and_reverse_are_those_of_a_direct_expansion(lens: list[int], cp: int) -> None:
    split = split_context(lens, cp)
    assert split.mirror.tolist() == [expand(lens, cp, rank) for rank in range(cp)]
    flat = split.mirror.flatten()
    assert flat[split.reverse].tolist() == list(range(sum(lens)))
    assert sorted(row for rank in range(cp) for row in split.rows(rank).tolist()) == list(range(sum(lens)))
    begins = np.cumsum(lens) - lens
    for rank in range(cp):
        pieces = pieces_of(rank, np.array(lens, dtype=np.int64), cp)
        assert [begins[s] + first + i for s, first, count in pieces for i in range(count)] == split.rows(rank).tolist()
    for rank in range(cp):
        assert split.rows(rank).tolist() == sorted(split.rows(rank).tolist())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90)), max_size=8), CP, st.sampled_from([1, 2, 4]))
def test_key_ranges_are_those_of_a_direct_expansion(sequences: list[tuple[int, int]], cp: int, ratio: int) -> None:
    lens = np.array([new for new, _ in sequences], dtype=np.int64)
    key_lens = lens + np.array([old for _, old in sequences], dtype=np.int64)
    wanted = []
    segment = 0
    for new, old in sequences:
        total = new + old
        wanted += [(segment, segment + (total - new + i + 1) // ratio) for i in range(new)]
        segment += max(1, total // ratio)
    split = split_context(lens, cp)
    for rank in range(cp):
        start, end = key_ranges(split, rank, lens, key_lens, ratio)
        assert list(zip(start.tolist(), end.tolist(), strict=True)) == [wanted[row] for row in split.rows(rank)]


@pytest.mark.parametrize("lens", [[], [0], [1], [0, 0, 1, 0], [1] * 2000, list(range(2000)), [65536]])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_empty_short_and_many_sequences(lens: list[int], cp: int) -> None:
    split = split_context(lens, cp)
    assert split.local_len == sum(2 * (-(-count // (2 * cp))) for count in lens)
    assert split.mirror.flatten()[split.reverse].tolist() == list(range(sum(lens)))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 3000), CP)
def test_ranks_have_equal_causal_work_within_one_piece(new: int, old: int, cp: int) -> None:
    split = split_context([new], cp)
    lens, key_lens = np.array([new]), np.array([new + old])
    pairs = []
    for rank in range(cp):
        start, end = key_ranges(split, rank, lens, key_lens, 1)
        pairs.append(int((end - start).sum()))
    # Only what padding stands for is missing anywhere: less than 2 * cp rows, so less than a piece of a long prompt.
    piece = int(piece_tokens(lens, cp)[0])
    padding = 2 * cp * piece - new
    assert max(pairs) - min(pairs) <= padding * (2 * cp * piece + old)
    if new >= (2 * cp) ** 2:
        assert padding <= piece
    if padding == 0:
        assert max(pairs) == min(pairs)


@settings(max_examples=40, deadline=None)
@given(LENS.filter(lambda lens: sum(lens) > 0), st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False))
def test_every_rank_gets_the_rows_it_wants(lens: list[int], cp: int, random) -> None:  # type: ignore[no-untyped-def]
    total = sum(lens)
    split = split_context(lens, cp)
    values = torch.arange(total * 3).view(total, 3).float()
    wanted = np.array(sorted(random.sample(range(total), random.randint(0, total))), dtype=np.int64)
    mine = [np.array([row for row in wanted if row % cp == rank], dtype=np.int64) for rank in range(cp)]
    meeting, board = threading.Barrier(cp), [None] * cp
    found: list[object] = [None] * cp

    def run(rank: int) -> None:
        group = ThreadTensors(rank, cp, meeting, board)
        local = values[torch.from_numpy(split.rows(rank))]
        everything = np.arange(total)
        every = RowGather.of(group, split, everything, everything, local.device)(local)
        some = RowGather.of(group, split, wanted, mine[rank], local.device)(local)
        found[rank] = every.equal(values), some.equal(values[torch.from_numpy(mine[rank])])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(cp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(True, True)] * cp
