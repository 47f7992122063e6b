"""Lengths of verifications: budgets from synthetic cost curves, their distribution, and that they do not bias the output."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.distribution import probabilities
from engine.drafter import Drafter
from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import SamplingParams
from engine.sampler import Sampler
from engine.spec_costs import CostModel, Curve
from engine.spec_lengths import FixedLength, ThroughputLength, survival_rates
from engine.spec_modes import MAX_REST, TRIAL
from hicache.config import HiCacheConfig
from tests.engine.fake_runner import FakeLimits, FakeRunner
from tests.engine.test_spec_costs import FLAT, FREE, line
from tests.engine.test_spec_decode import Table, chi_square_fits, sequence
from tests.engine.test_speculation import assert_same, make_engine, random_requests, run


def policy(steps: Curve = FLAT, drafts: Curve = FREE, max_drafts: int = 5) -> ThroughputLength:
    return ThroughputLength(CostModel(steps, drafts), max_drafts)


# ---- budgets


def test_a_draft_after_a_pause_says_nothing_about_the_next_one():
    one = policy(line(0.001, 0.010), drafts=line(0.001, 0.0))
    while not one.budget([[0.1] * 5] * 3, [5] * 3):
        pass
    for _ in range(9):
        one.observe_draft(3, 1.0)
    assert one.cost.draft_s(3) == pytest.approx(0.001)
    for _ in range(TRIAL - 1):
        assert one.budget([[0.1] * 5] * 3, [5] * 3)
        one.observe_draft(3, 0.004)
    assert one.cost.draft_s(3) == pytest.approx(0.004)


def test_drafts_that_became_cheap_again_are_made_again():
    one = policy(line(0.010, 0.0), drafts=line(0.001, 0.0))
    rates, rooms = [[0.5, 0.2, 0.1, 0.0, 0.0]] * 3, [5] * 3
    assert one.budget(rates, rooms)
    for _ in range(9):
        one.observe_draft(3, 0.1)
    assert one.budget(rates, rooms) == 0
    steps = 0
    while not one.budget(rates, rooms):
        steps += 1
    for _ in range(TRIAL):
        one.observe_draft(3, 0.001)
        assert one.budget(rates, rooms) > 3
    assert all(one.budget(rates, rooms) > 3 for _ in range(50))


@pytest.mark.parametrize("drafts_s", [1.0, 1e-6])
def test_a_pause_is_known_without_a_look_at_the_sequences(drafts_s):
    """Counted the same whoever asks: the caller that saves its lists, or the one that has made them."""
    asked, saved = (policy(line(0.010, 0.001), drafts=line(drafts_s, 0.0)) for _ in range(2))
    rates, rooms = [[0.9] * 5] * 3, [5] * 3
    rests = 0
    for _ in range(200):
        rest = saved.rests(3)
        rests += rest
        assert asked.budget(rates, rooms) == (0 if rest else saved.budget(rates, rooms))
    assert (rests < 20) if drafts_s < 1.0 else (rests > 180)


def test_everything_is_verified_when_rows_cost_nothing():
    assert policy().budget([[0.9, 0.5, 0.2, 0.1, 0.1]] * 3, [5, 5, 5]) == 15


def test_nothing_is_drafted_when_time_explodes_with_rows():
    one = policy(line(0.001, 0.010))
    assert [one.budget([[0.9] * 5] * 2, [5, 5]) for _ in range(5)] == [0] * 5


def test_drafts_that_cost_more_than_they_bring_are_not_made():
    costs = line(0.010, 0.0001), Curve((1, 1000), (0.020, 0.020))
    assert policy(*costs).budget([[0.5, 0.2, 0.1, 0.0, 0.0]], [5]) == 0
    assert policy(*costs).budget([[0.99, 0.98, 0.97, 0.96, 0.95]], [5]) == 5


def test_the_budget_falls_as_rows_get_dearer():
    rates = [[0.9, 0.8, 0.6, 0.4, 0.2], [0.7, 0.5, 0.3, 0.1, 0.0]]
    budgets = [policy(line(0.010, cost)).budget(rates, [5, 5]) for cost in (0.0, 0.001, 0.002, 0.004, 0.008, 0.016)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == 9  # the draft of rate 0 adds nothing, and the smaller of equals wins
    assert budgets[-1] == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(1, 8), cost=st.sampled_from([0.0, 0.001, 0.003, 0.01]))
def test_the_budget_is_the_best_of_all(seed, num, cost):
    rng = random.Random(seed)
    rates = [np.cumprod([rng.random() for _ in range(4)]).tolist() for _ in range(num)]
    rooms = [rng.randint(1, 4) for _ in range(num)]
    one = policy(line(0.01, cost), drafts=line(0.001, 0.0002), max_drafts=4)
    ranked = sorted((rate for row, room in zip(rates, rooms, strict=True) for rate in row[:room]), reverse=True)
    draft_s = one.cost.draft_s(num)
    plain = num / one.cost.plain_s(num)
    times = enumerate(one.cost.verify_s(num, len(ranked)), 1)
    speeds = [plain, *((num + sum(ranked[:count])) / (step_s + draft_s) for count, step_s in times)]
    assert one.budget(rates, rooms) == speeds.index(max(speeds))


def test_drafts_that_are_never_kept_are_given_up_whatever_their_confidence():
    one = policy(line(0.010, 0.002), drafts=line(0.004, 0.001))
    sure = [0.9, 0.8, 0.7, 0.6, 0.5]
    assert one.budget([sure], [5]) > 0
    for _ in range(200):
        one.observe([sure], [5], [0])
    assert not all(one.budget([sure], [5]) for _ in range(3))


def test_modest_confidences_are_raised_when_the_drafts_are_kept():
    one = policy(line(0.010, 0.002), drafts=line(0.002, 0.001))
    modest = [0.3, 0.1, 0.05, 0.02, 0.01]
    assert one.budget([modest], [5]) == 0
    for _ in range(200):
        one.observe([modest], [2], [1])
    assert max(one.budget([modest], [5]) for _ in range(MAX_REST)) > 0


def carry_of(second_round):
    """What a policy learns from rounds of random rates, each followed by `second_round` of it."""
    one, rng = policy(), random.Random(1)
    for _ in range(300):
        first = np.cumprod([rng.random() for _ in range(5)]).tolist()
        second = second_round(first, rng)
        for rates in (first, second):
            one.observe([rates], [5], [0])
        one.budget([first], [5])
        one.lengths([second], [5], 5)
    return one.carry


def test_rates_carry_over_as_far_as_rounds_resemble_the_ones_before():
    assert carry_of(lambda first, rng: first) > 0.95
    assert carry_of(lambda first, rng: np.cumprod([rng.random() for _ in range(5)]).tolist()) < 0.25


def test_one_poor_round_does_not_end_drafting_when_rounds_are_unlike_each_other():
    steps, good, poor = line(0.010, 0.002), [0.9, 0.8, 0.7, 0.6, 0.5], [0.1, 0.0, 0.0, 0.0, 0.0]
    fresh, seasoned = policy(steps), policy(steps)
    rng = random.Random(2)
    for _ in range(300):
        before, after = (poor if rng.random() < 0.2 else good for _ in range(2))
        seasoned.budget([before], [5])
        seasoned.lengths([after], [5], 5)
        seasoned.observe([after], [5], [5 if after is good else 0])
    assert fresh.budget([poor], [5]) == 0
    assert seasoned.budget([poor], [5]) > 0


# ---- distribution


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(1, 9))
def test_lengths_sum_to_the_budget_and_take_the_largest_rates(seed, num):
    rng = random.Random(seed)
    rates = [np.cumprod([rng.choice([1.0, 0.9, 0.5, rng.random()]) for _ in range(4)]).tolist() for _ in range(num)]
    rooms = [rng.randint(0, 4) for _ in range(num)]
    budget = rng.randint(1, 4 * num)
    lengths = policy(max_drafts=4).lengths(rates, rooms, budget)
    assert sum(lengths) == min(budget, sum(rooms))
    assert all(length <= room for length, room in zip(lengths, rooms, strict=True))
    taken = [row[i] for row, length in zip(rates, lengths, strict=True) for i in range(length)]
    left = [row[i] for row, length, room in zip(rates, lengths, rooms, strict=True) for i in range(length, room)]
    assert not taken or not left or min(taken) >= max(left)


def test_equal_rates_go_to_the_lower_sequence():
    assert policy(max_drafts=2).lengths([[0.5, 0.5]] * 3, [2] * 3, 3) == [2, 1, 0]


def test_a_draft_is_included_whatever_stands_behind_it():
    """The newest rates of later drafts must not decide about an earlier one: that would bias the output."""
    one = policy(max_drafts=3)
    high, low = one.lengths([[0.6, 0.6, 0.6], [0.7, 0.5, 0.1]], [3, 3], 2), one.lengths([[0.6, 0.0, 0.0], [0.7, 0.5, 0.1]], [3, 3], 2)
    assert (high[0] >= 1) == (low[0] >= 1)


# ---- rates


def test_rates_are_products_of_calibrated_confidences():
    confidence, temperatures = [[0.0, 2.0, 1000.0]], [1.0, 2.0, 1.0]
    [rates] = survival_rates(confidence, temperatures)
    assert rates == pytest.approx([0.5, 0.5 * 0.7310586, 0.5 * 0.7310586])


@pytest.mark.parametrize("text", ["", "a", "0", "1,2", "-1", "inf", "1,1,1,1,1,1"])
def test_temperatures_are_one_number_or_one_per_draft(text):
    with pytest.raises(ConfigError, match="dflash_confidence_head_temperature"):
        EngineConfig(dflash_confidence_head_temperature=text)


def test_temperatures_of_the_drafts_in_use():
    assert EngineConfig(dflash_confidence_head_temperature="1,2,3,4,5").confidence_temperatures(3) == [1.0, 2.0, 3.0]
    assert EngineConfig(dflash_confidence_head_temperature="1.5").confidence_temperatures(2) == [1.5, 1.5]


# ---- nothing of it shows in the output


class Moody(FixedLength):
    """Budgets that follow the rates of the round before as wildly as the rule permits."""

    def budget(self, rates, rooms):
        return int(sum(1000 * sum(row) for row in rates)) % (sum(rooms) + 1)

    def lengths(self, rates, rooms, budget):
        return ThroughputLength.lengths(self, rates, rooms, budget)


class Older(FixedLength):
    """Verifies a sequence's drafts only if its last round's second draft was a high id: allowed, since that round is over."""

    def budget(self, rates, rooms):
        self.chosen = [not row or row[2] > 0.5 * row[1] for row in rates]
        return None

    def lengths(self, rates, rooms, budget):
        return [room if chosen else 0 for room, chosen in zip(rooms, self.chosen, strict=True)]


def telling_table(vocab: int) -> Table:
    """A drafter whose confidences depend on the drafts as strongly as they may."""
    table = Table(vocab, seed=3, distance=1.5)
    plain = table.draft

    def draft(slices, choose=None):
        output = plain(slices, choose)
        before = torch.cat((torch.tensor([[piece.token_id] for piece in slices]), output.token_ids[:, :-1]), 1)
        output.confidence = before.float() - 1.5
        return output

    table.draft = draft
    return table


def by_cost() -> ThroughputLength:
    return policy(line(0.010, 0.003), line(0.001, 0.0), 3)


@pytest.mark.parametrize("make", [FixedLength, Moody, Older, by_cost])
def test_variable_lengths_do_not_bias_sampled_sequences(make):
    vocab, num = 5, 2500
    table = telling_table(vocab)
    drafter, sampler = Drafter(table, 3, frozenset(), make()), Sampler(10**6, frozenset())
    seqs = [sequence(seed, [], seeded=False) for seed in range(num)]
    while short := [seq for seq in seqs if seq.output_len < 3]:
        for first in range(0, len(short), 60):  # groups compete for each budget
            group = short[first : first + 60]
            for seq, new in zip(group, table.step(group, drafter, sampler), strict=True):
                seq.token_ids += new
    got = np.array([seq.token_ids[2:5] for seq in seqs])
    step = probabilities(table.target, [SamplingParams()] * vocab).double().numpy()
    expected = np.einsum("a,ab,bc->abc", step[4], step, step).ravel() * num
    assert chi_square_fits(np.bincount(np.ravel_multi_index(got.T, (vocab,) * 3), minlength=vocab**3), expected)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_coupled_output_does_not_depend_on_lengths(seed):
    rng = random.Random(seed)
    requests = random_requests(rng, 15)
    plain = run(make_engine(spec=False), requests)
    engine = make_engine(2.0)
    engine.drafter.policy = Moody()
    assert_same(run(engine, requests, arrive=rng), plain)


def test_costs_are_measured_again_when_the_model_takes_another_path():
    limits = FakeLimits(max_model_len=100, num_blocks=80, max_num_seqs=2, draft_block_size=5)
    runner = FakeRunner(limits, draft_noise=2.0)
    runner.path = "slow"
    engine = Engine(EngineConfig(), HiCacheConfig(size_gb=0), runner=runner)
    first = engine.drafter.policy
    requests = random_requests(random.Random(4), 2, ignore_eos=True, max_tokens=40, min_tokens=0, stop_token_ids=())
    plain = run(make_engine(spec=False, limits=limits), requests)
    for request in requests:
        engine.add_request(request)
    outputs = {request.request_id: [] for request in requests}
    for step in range(500):
        runner.path = "slow" if step < 5 else "fast"
        for output in engine.step():
            outputs[output.request_id].append(output)
        assert (engine.drafter.policy is first) or step >= 5
        if engine.idle:
            break
    assert engine.drafter.policy is not first
    assert_same(outputs, plain)
    assert engine.scheduler.blocks.blocks.num_used == 0


def test_the_engine_measures_and_decides_by_itself():
    limits = FakeLimits(max_model_len=200, num_blocks=200, max_num_seqs=2, draft_block_size=5)
    engine = Engine(EngineConfig(), HiCacheConfig(size_gb=0), runner=FakeRunner(limits, draft_noise=30.0))
    assert isinstance(engine.drafter.policy, ThroughputLength)
    requests = random_requests(random.Random(1), 4, ignore_eos=True, max_tokens=150, temperature=0.0, stop_token_ids=())
    plain = run(Engine(EngineConfig(spec=False), HiCacheConfig(size_gb=0), runner=FakeRunner(limits)), requests)
    assert_same(run(engine, requests), plain)
