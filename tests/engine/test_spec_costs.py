"""What steps cost: the measured curve, and how the steps that are taken correct it."""

import random

import numpy as np
import pytest

from engine.spec_costs import FORGET_PLAIN, RECENT_STEPS, CostModel, Curve

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


def test_sequences_and_drafts_add_what_their_own_steps_have_shown():
    """Contexts cost per sequence, mostly: one slope over all rows would make plain steps too cheap and verify steps too dear."""
    cost = CostModel(line(0.010, 0.001), FREE)

    def seconds(num_seqs, num_drafts):
        return 0.010 + 0.001 * (num_seqs + num_drafts - 1) + 0.004 * num_seqs + 0.0005 * num_drafts

    for num_seqs, num_drafts in [(4, 0), (7, 0), (4, 3), (5, 20), (4, 10)]:
        cost.observe(num_seqs + num_drafts, num_seqs, seconds(num_seqs, num_drafts))
    assert cost.shares(6) == pytest.approx((0.004, 0.0005), rel=1e-2)
    assert cost.plain_s(6) == pytest.approx(seconds(6, 0), rel=1e-2)
    assert cost.verify_s(6, 30) == pytest.approx([seconds(6, count) for count in range(1, 31)], rel=1e-2)


def test_steps_of_few_sequences_say_nothing_about_steps_of_many():
    """What a step costs whatever its size would be counted once per sequence."""
    cost = CostModel(FLAT, FREE)
    cost.observe(1, 1, 0.030)
    cost.observe(6, 1, 0.030)
    cost.observe_draft(1, 9.0)
    assert (cost.plain_s(1), cost.plain_s(2), cost.plain_s(64)) == pytest.approx((0.030, 0.010, 0.010))
    assert cost.draft_s(2) == pytest.approx(FREE(2))
    cost.observe(16, 16, 0.050)
    assert cost.plain_s(1) == pytest.approx(0.030)  # it is remembered for when there are few again


def test_a_kind_of_step_that_nobody_has_taken_is_believed_to_be_cheap():
    plain, verified = CostModel(FLAT, FREE), CostModel(FLAT, FREE)
    plain.observe(4, 4, 0.018)
    assert plain.verify_s(4, 20)[-1] == plain.plain_s(4) == pytest.approx(0.018)
    verified.observe(24, 4, 0.034)
    assert verified.plain_s(4) == pytest.approx(0.014)
    assert verified.verify_s(4, 20)[-1] == pytest.approx(0.034)


def test_a_share_is_the_median_of_the_last_steps():
    cost, rng, plain, verified, warm = CostModel(FLAT, FREE), random.Random(5), [], [], True
    for _ in range(300):
        extra = rng.choice([-0.001, 0.001, rng.random()])
        if rng.random() < 0.5:
            cost.observe(2, 2, 0.010 + extra)
            plain, warm = [*plain, extra / 2][-RECENT_STEPS:] if warm else plain, True
        else:
            cost.observe(8, 2, 0.010 + extra)
            warm = False
            verified = [*verified, extra][-RECENT_STEPS:]
        if plain and verified:
            per_seq_s = np.median(plain)
            assert cost.shares(2) == pytest.approx((per_seq_s, (np.median(verified) - 2 * per_seq_s) / 6))


def test_the_first_plain_step_behind_a_verify_step_says_nothing():
    """Other weights and rows are in the caches then. One such step, 1.98 ms for 1.42, kept drafts at four streams for 256 steps."""
    cost = CostModel(FLAT, FREE)
    cost.observe(24, 4, 0.010)
    cost.observe(4, 4, 0.090)
    assert cost.plain_s(4) == pytest.approx(0.010)
    cost.observe(4, 4, 0.014)
    assert cost.plain_s(4) == pytest.approx(0.014)


def test_nothing_takes_less_than_no_time():
    cost = CostModel(FLAT, FREE)
    for rows in (1, 6):
        cost.observe(rows, 1, 0.001)
    assert cost.plain_s(64) > 0.0
    assert min(cost.verify_s(64, 320)) > 0.0


def test_what_plain_steps_took_is_forgotten_when_none_has_been_taken_for_long():
    cost = CostModel(FLAT, FREE)
    cost.observe(4, 4, 0.090)
    for _ in range(FORGET_PLAIN - 1):
        cost.observe(24, 4, 0.034)
    assert cost.plain_s(4) == pytest.approx(0.090)
    cost.observe(24, 4, 0.034)
    assert cost.plain_s(4) == pytest.approx(0.014)


def test_drafts_cost_what_the_last_ones_took_over_their_curve():
    cost = CostModel(FLAT, line(0.001, 0.0))
    for seconds in (0.003, 0.003, 9.0):
        cost.observe_draft(4, seconds)
    assert cost.draft_s(4) == pytest.approx(0.003)
    cost.forget_drafts(4)
    assert cost.draft_s(4) == pytest.approx(0.003)
    cost.observe_draft(4, 0.0005)
    assert cost.draft_s(4) == pytest.approx(0.0005)


def test_a_look_anew_at_drafts_forgets_what_verifying_them_took():
    cost = CostModel(FLAT, FREE)
    cost.observe(4, 4, 0.014)
    cost.observe(24, 4, 0.090)
    cost.forget_drafts(4)
    assert cost.verify_s(4, 20)[-1] == pytest.approx(0.014)
    cost.observe(8, 4, 0.018)
    assert cost.verify_s(4, 20)[-1] == pytest.approx(0.034)
