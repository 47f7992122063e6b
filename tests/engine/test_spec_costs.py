"""What steps cost: the measured curve, and how the steps that are taken correct it."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.spec_costs import ENOUGH, LEAST_S, RECENT, CostModel, Curve, size_class

FLAT = Curve((1, 1000), (0.010, 0.010))
FREE = Curve((1, 1000), (1e-6, 1e-6))


def line(first_s: float, per_row_s: float) -> Curve:
    return Curve((1, 1001), (first_s, first_s + 1000 * per_row_s))


# ---- the curve


def test_a_curve_is_a_line_between_points_and_goes_on_behind_the_last():
    curve = Curve.of([(1, 1.0), (4, 4.0), (8, 6.0)])
    assert [curve(size) for size in (0, 1, 2, 4, 6, 8, 12)] == [1.0, 1.0, 2.0, 4.0, 5.0, 6.0, 8.0]
    assert [Curve((4,), (2.0,))(size) for size in (1, 4, 9)] == [2.0] * 3


def test_more_rows_are_never_modelled_as_faster():
    assert Curve.of([(1, 3.0), (2, 2.0), (4, 5.0)]).seconds == (3.0, 3.0, 5.0)


# ---- what steps take beyond it


def taken(cost: CostModel, num_seqs: int, num_drafts: int, *seconds: float) -> None:
    """Steps of one kind in a row; the first one, which finds other things in the caches, says nothing."""
    for one in (9.0, *seconds):
        cost.observe(num_seqs + num_drafts, num_seqs, one)


def test_sequences_and_drafts_add_what_their_own_steps_have_shown():
    """Contexts cost per sequence, mostly: one slope over all rows would make plain steps too cheap and verify steps too dear."""
    cost = CostModel(line(0.010, 0.001), FREE)

    def seconds(num_seqs, num_drafts):
        return 0.010 + 0.001 * (num_seqs + num_drafts - 1) + 0.004 * num_seqs + 0.0005 * num_drafts

    for num_seqs, num_drafts in [(8, 0), (7, 0), (6, 3), (9, 20), (8, 10)]:
        taken(cost, num_seqs, num_drafts, *[seconds(num_seqs, num_drafts)] * 2)
    assert cost.plain_s(8) == pytest.approx(seconds(8, 0), rel=1e-2)
    assert cost.verify_s(8, 30) == pytest.approx([seconds(8, count) for count in range(1, 31)], rel=1e-2)


def test_steps_of_few_sequences_say_nothing_about_steps_of_many():
    """What a step costs whatever its size would be counted once per sequence."""
    cost = CostModel(FLAT, FREE)
    taken(cost, 1, 0, *[0.030] * ENOUGH)
    taken(cost, 1, 5, *[0.030] * ENOUGH)
    for _ in range(ENOUGH):
        cost.observe_draft(1, 9.0)
    assert (cost.plain_s(1), cost.plain_s(2), cost.plain_s(64)) == pytest.approx((0.030, 0.010, 0.010))
    assert cost.draft_s(2) == pytest.approx(FREE(2))
    taken(cost, 16, 0, *[0.050] * ENOUGH)
    assert cost.plain_s(1) == pytest.approx(0.030)  # it is remembered for when there are few again


@settings(deadline=None)
@given(st.integers(1, 4096))
def test_numbers_of_sequences_that_are_told_apart_differ_by_less_than_a_factor_of_2(num_seqs):
    same = [other for other in range(num_seqs // 2, 2 * num_seqs + 1) if other and size_class(other) == size_class(num_seqs)]
    assert max(same) < 2 * min(same)


@pytest.mark.parametrize("limit", [4, 8, 16, 32, 64, 128, 256])
def test_one_sequence_less_than_a_usual_limit_is_about_as_many(limit):
    assert size_class(limit - 1) == size_class(limit) == size_class(limit + 1)


def test_a_kind_of_step_that_nobody_has_taken_is_believed_to_be_cheap():
    plain, verified = CostModel(FLAT, FREE), CostModel(FLAT, FREE)
    taken(plain, 4, 0, *[0.018] * ENOUGH)
    assert plain.verify_s(4, 20)[-1] == plain.plain_s(4) == pytest.approx(0.018)
    taken(verified, 4, 20, *[0.034] * ENOUGH)
    assert verified.plain_s(4) == pytest.approx(0.014)
    assert verified.verify_s(4, 20)[-1] == pytest.approx(0.034)


def test_a_share_is_the_median_of_the_last_steps():
    cost, rng, kinds = CostModel(FLAT, FREE), random.Random(5), {False: [], True: []}
    before = None
    for _ in range(300):
        extra, verifies = rng.choice([-0.001, 0.001, rng.random()]), rng.random() < 0.5
        cost.observe(8 if verifies else 2, 2, 0.010 + extra)
        if verifies is before:
            kinds[verifies] = [*kinds[verifies], extra][-RECENT:]
        before = verifies
        if min(map(len, kinds.values())) >= ENOUGH:
            per_seq_s = np.median(kinds[False]) / 2
            per_draft_s = (np.median(kinds[True]) - 2 * per_seq_s) / 6
            assert cost.plain_s(2) == pytest.approx(max(0.010 + 2 * per_seq_s, LEAST_S))
            assert cost.verify_s(2, 4)[-1] == pytest.approx(max(0.010 + 2 * per_seq_s + 4 * per_draft_s, LEAST_S))


def test_few_steps_are_not_believed():
    """One plain step, 2.68 ms for 2.05, kept drafts at eight streams for 256 steps."""
    cost = CostModel(FLAT, FREE)
    taken(cost, 4, 20, *[0.010] * ENOUGH)
    taken(cost, 4, 0, 0.090, 0.014)
    assert cost.plain_s(4) == pytest.approx(0.010)
    cost.observe(4, 4, 0.014)
    assert cost.plain_s(4) == pytest.approx(0.014)


def test_the_first_step_behind_one_of_the_other_kind_says_nothing():
    """Other weights and rows are in the caches then: at four streams 1.98 ms for 1.42."""
    cost = CostModel(FLAT, FREE)
    for _ in range(RECENT):
        cost.observe(4, 4, 0.090)
        cost.observe(24, 4, 0.090)
    assert cost.plain_s(4) == cost.verify_s(4, 20)[-1] == pytest.approx(0.010)


def test_nothing_takes_less_than_no_time():
    cost = CostModel(FLAT, FREE)
    for drafts in (0, 5):
        taken(cost, 64, drafts, *[0.0] * ENOUGH)
    assert cost.plain_s(64) > 0.0
    assert min(cost.verify_s(64, 320)) > 0.0


def test_drafts_cost_what_the_last_ones_took_over_their_curve():
    cost = CostModel(FLAT, line(0.001, 0.0))
    for seconds in (0.003, 0.003):
        cost.observe_draft(4, seconds)
    assert cost.draft_s(4) == pytest.approx(0.001)  # too few
    cost.observe_draft(4, 9.0)
    assert cost.draft_s(4) == pytest.approx(0.003)


def test_what_is_forgotten_decides_no_more():
    cost = CostModel(FLAT, line(0.001, 0.0))
    taken(cost, 4, 0, *[0.014] * ENOUGH)
    taken(cost, 4, 20, *[0.090] * ENOUGH)
    for _ in range(ENOUGH):
        cost.observe_draft(4, 0.007)
    cost.forget(4, drafts=True)
    assert (cost.verify_s(4, 20)[-1], cost.draft_s(4)) == pytest.approx((0.014, 0.001))
    taken(cost, 4, 20, *[0.034] * ENOUGH)
    assert cost.verify_s(4, 20)[-1] == pytest.approx(0.034)
    cost.forget(4, drafts=False)
    taken(cost, 4, 0, *[0.018] * ENOUGH)
    assert (cost.plain_s(4), cost.verify_s(4, 20)[-1]) == pytest.approx((0.018, 0.034))
