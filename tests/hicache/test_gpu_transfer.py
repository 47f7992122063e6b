"""Decisions of the GPU engines that need no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.gpu_transfer import ProbedTransfer, ProbeRow, merge_runs


@given(st.lists(st.integers(0, 12), max_size=12, unique=True), st.data(), st.integers(1, 4), st.frozensets(st.integers(0, 12)))
def test_merged_runs_cover_exactly_the_pairs_and_cross_no_border(
    frames: list[int], data: st.DataObject, most: int, borders: frozenset[int]
) -> None:
    rows = data.draw(st.lists(st.integers(0, 12), min_size=len(frames), max_size=len(frames), unique=True))
    runs = merge_runs(frames, rows, most, borders)
    assert [(f + i, r + i) for f, r, n in runs for i in range(n)] == list(zip(frames, rows, strict=True))
    for first, _, count in runs:
        assert 1 <= count <= most
        assert not borders & set(range(first + 1, first + count))


def test_neighbours_on_both_sides_become_one_copy() -> None:
    assert merge_runs([4, 5, 6, 9], [1, 2, 3, 4], 99, frozenset()) == [(4, 1, 3), (9, 4, 1)]
    assert merge_runs([4, 5, 6], [1, 2, 3], 99, frozenset({6})) == [(4, 1, 2), (6, 3, 1)]


class Recorder:
    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    def copy_in(self, frames: Sequence[int], device: torch.Tensor, rows: Sequence[int]) -> None:
        self.calls += 1

    def copy_out(self, device: torch.Tensor, rows: Sequence[int], frames: Sequence[int]) -> None:
        self.calls += 1


@pytest.mark.parametrize(
    ("direction", "pages", "winner"), [("in", 1, "b"), ("in", 20, "a"), ("in", 5000, "a"), ("out", 3, "a"), ("out", 16, "b")]
)
def test_call_goes_to_the_engine_that_was_fastest_for_its_direction_and_size(direction: str, pages: int, winner: str) -> None:
    speeds = {("in", 1): (1, 2), ("in", 16): (3, 2), ("out", 1): (5, 4), ("out", 16): (1, 9)}
    engines = [Recorder("a"), Recorder("b")]
    table = [ProbeRow(e.name, d, n, speeds[d, n][i]) for d, n in speeds for i, e in enumerate(engines)]
    chosen = ProbedTransfer(engines, table)
    work = list(range(pages))
    if direction == "in":
        chosen.copy_in(work, torch.empty(0), work)
    else:
        chosen.copy_out(torch.empty(0), work, work)
    assert {e.name: e.calls for e in engines}[winner] == 1
