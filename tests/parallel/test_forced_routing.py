"""Forced routing: the first rank gets its ratio of the mean, whatever the rows; all others get the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parallel.forced_routing import ForcedRouting


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.floats(1.0, 2.0), st.integers(0, 40), st.integers(0, 7))
def test_ranks_get_what_was_asked_for(ranks: int, ratio: float, layer: int, rank: int) -> None:
    experts, chosen, rows = 48, 6, 640
    forced = ForcedRouting(ratio, ranks, experts // ranks, experts)
    ids = forced(torch.zeros(rows, chosen, dtype=torch.int64), layer, rank % ranks)
    load = torch.bincount(ids.flatten() // (experts // ranks), minlength=ranks).double() / (rows * chosen / ranks)
    assert abs(load[0] - ratio) < 0.01
    assert (load[1:] - (ranks - ratio) / (ranks - 1)).abs().max() < 0.02


@pytest.mark.parametrize("ratio", [1.0, 1.5, 1.9])
def test_a_row_never_asks_an_expert_twice(ratio: float) -> None:
    ids = ForcedRouting(ratio, 2, 192, 384)(torch.zeros(300, 6, dtype=torch.int64), 3, 1)
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < 384


def test_few_rows_are_spread_as_well() -> None:
    ids = ForcedRouting(1.0, 4, 96, 384)(torch.zeros(8, 6, dtype=torch.int64), 0, 0)
    assert all(11 <= load <= 13 for load in torch.bincount(ids.flatten() // 96, minlength=4).tolist())
