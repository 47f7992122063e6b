"""Slots and experts: the maps invert each other, plans beat what was there, moved weights are where the maps say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parallel.eplb_plan import busiest, plan
from engine.parallel.expert_moves import move_experts
from engine.parallel.placement import Placement, transfers
from tests.engine.simulation import run_ranks


@st.composite
def placements(draw, ranks=None, shape=None):
    ranks = ranks or draw(st.sampled_from([1, 2, 3, 4]))
    experts, per_rank = shape or (draw(st.integers(1, 12)), None)
    least = -(-experts // ranks)
    per_rank = per_rank or draw(st.integers(least, least + 3))
    rest = draw(st.lists(st.integers(0, experts - 1), min_size=ranks * per_rank - experts, max_size=ranks * per_rank - experts))
    return Placement(tuple(draw(st.permutations([*range(experts), *rest]))), experts, ranks)


@st.composite
def pairs(draw):
    before = draw(placements())
    return before, draw(placements(before.ranks, (before.num_experts, before.slots_per_rank)))


@given(experts=st.integers(1, 40), extra=st.integers(0, 9), ranks=st.integers(1, 8))
def test_the_first_placement_follows_the_specification(experts, extra, ranks):
    placement = Placement.initial(experts, extra, ranks)
    slots = len(placement.experts)
    assert slots % ranks == 0
    assert experts + extra <= slots < experts + extra + ranks
    assert placement.experts == tuple(slot if slot < experts else slot % experts for slot in range(slots))


@given(placement=placements())
def test_maps_are_mutually_inverse(placement):
    table, copies = placement.maps()
    assert table.shape == (placement.num_experts, len(placement.experts) - placement.num_experts + 1)
    for expert, (row, count) in enumerate(zip(table.tolist(), copies.tolist(), strict=True)):
        assert count >= 1
        assert row[count:] == [-1] * (len(row) - count)
        assert [placement.experts[slot] for slot in row[:count]] == [expert] * count
    assert int(copies.sum()) == len(placement.experts)


@given(pair=pairs())
def test_settling_keeps_what_each_rank_has_and_moves_nothing_inside_it(pair):
    before, after = pair
    settled = after.settled(before)
    for rank in range(before.ranks):
        assert sorted(settled.held_by(rank)) == sorted(after.held_by(rank))
        common = sum(min(before.held_by(rank).count(e), after.held_by(rank).count(e)) for e in range(before.num_experts))
        assert sum(a == b for a, b in zip(before.held_by(rank), settled.held_by(rank), strict=True)) == common


@given(pair=pairs())
def test_transfers_fill_exactly_the_slots_that_change_and_prefer_the_own_rank(pair):
    before, after = pair
    moves = transfers(before, after)
    changed = [slot for slot, (a, b) in enumerate(zip(before.experts, after.experts, strict=True)) if a != b]
    assert sorted(move.target for move in moves) == changed
    count = before.slots_per_rank
    served: dict[int, dict[int, int]] = {}
    for move in moves:
        expert = after.experts[move.target]
        assert before.experts[move.source] == expert
        if expert in before.held_by(move.target // count):
            assert move.source // count == move.target // count
        else:
            by_rank = served.setdefault(expert, {rank: 0 for rank in range(before.ranks) if expert in before.held_by(rank)})
            by_rank[move.source // count] += 1
    assert all(max(by_rank.values()) - min(by_rank.values()) <= 1 for by_rank in served.values())


@settings(max_examples=20, deadline=None)
@given(pair=pairs(), seed=st.integers(0, 99))
def test_moving_over_ranks_equals_gathering_and_indexing(pair, seed):
    before, after = pair
    weights = torch.randn(before.num_experts, 3, generator=torch.Generator().manual_seed(seed))
    codes = torch.randint(0, 255, (before.num_experts, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))

    def rank_main(world):
        held = list(before.held_by(world.rank))
        shared = torch.full((1, 3), 7.0)  # behind the slots, as the shared expert is in some layers
        stores = [torch.cat((weights[held], shared)), codes[held].clone()]
        received = move_experts(world.split(before.ranks, "cpu"), stores, before, after)
        wanted = list(after.held_by(world.rank))
        assert torch.equal(stores[0], torch.cat((weights[wanted], shared)))
        assert torch.equal(stores[1], codes[wanted])
        return received

    received = run_ranks(before.ranks, rank_main)
    count = before.slots_per_rank
    foreign = sum(move.source // count != move.target // count for move in transfers(before, after))
    assert sum(received) == foreign * (3 * 4 + 4)


@settings(max_examples=60, deadline=None)
@given(placement=placements(), seed=st.integers(0, 999), skew=st.floats(0, 3))
def test_a_plan_is_valid_deterministic_and_never_worse(placement, seed, skew):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(20 * rng.pareto(1.5, placement.num_experts) ** skew + 0.1, (6, placement.num_experts)).astype(float)
    planned = plan(counts, placement)
    assert len(planned.experts) == len(placement.experts)
    assert busiest(counts, planned) <= busiest(counts, placement)
    assert plan(counts.copy(), placement) == planned
    assert plan(counts, planned) == planned or busiest(counts, plan(counts, planned)) < busiest(counts, planned)


def test_a_hot_expert_gets_the_copies_and_the_ranks_come_out_even():
    counts = np.ones((10, 16))
    counts[:, 7] = 8
    before = Placement.initial(16, 4, 4)
    planned = plan(counts, before)
    copies = np.bincount(planned.experts)
    assert copies[7] == copies.max() > 2
    ideal = counts.sum() / 4
    assert busiest(counts, planned) <= 1.1 * ideal < 1.4 * ideal < busiest(counts, before)


def test_an_expert_that_is_hot_now_and_then_counts_by_its_peaks():
    counts = np.ones((4, 4))
    counts[0, 0] = counts[1, 1] = 9  # never at once: they may share a rank
    planned = plan(counts, Placement.initial(4, 0, 2))
    assert busiest(counts, planned) == pytest.approx(10 + 10 + 2 + 2)
