"""Chosen lengths over whole loads, on pretended machines: never much slower than every draft or none, whatever pays."""

import random
from dataclasses import replace

import pytest

from engine.spec_costs import CostModel, Curve
from engine.spec_lengths import FixedLength, ThroughputLength
from tests.engine.spec_rounds import MAX_DRAFTS, SIZES, Machine, tokens_per_second


class NoDrafts(FixedLength):
    def budget(self, rates, rooms):
        return 0


MACHINES = {
    "small model, short contexts": Machine(5e-4, 1.3e-4, more_per_seq_s=1e-5, more_per_draft_s=0.0, draft_s=1e-4, draft_seq_s=2.5e-4),
    "small model": Machine(5e-4, 1.3e-4, more_per_seq_s=2e-4, more_per_draft_s=4e-5, draft_s=1e-4, draft_seq_s=4e-4),
    "small model, tokens drawn": Machine(
        5e-4, 1.3e-4, more_per_seq_s=3e-4, more_per_draft_s=2e-4, draft_s=1.5e-3, draft_seq_s=8e-4, more_s=5e-4
    ),
    "long contexts": Machine(5e-4, 1.5e-4, more_per_seq_s=3e-4, more_per_draft_s=2e-5, draft_s=1e-4, draft_seq_s=4e-4),
    "rows almost free": Machine(1e-2, 5e-5, more_per_seq_s=5e-5, more_per_draft_s=2e-5, draft_s=1e-3, draft_seq_s=2e-5),
    "drafts never pay": Machine(5e-4, 3e-4, more_per_seq_s=1e-4, more_per_draft_s=1e-4, draft_s=1e-4, draft_seq_s=8e-4),
}


@pytest.mark.parametrize("streams", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", MACHINES)
def test_chosen_lengths_lose_little_against_every_draft_and_against_none(name, streams):
    """With curves that are measured on empty contexts and 5 % wrong, on a machine whose steps scatter by 10 %."""
    machine = MACHINES[name]
    best = max(tokens_per_second(policy, machine, streams) for policy in (FixedLength(), NoDrafts()))
    for seed in range(2):
        policy = machine.chosen_lengths(0.05, random.Random(seed))
        assert tokens_per_second(policy, machine, streams, noise=0.1) > 0.95 * best


@pytest.mark.parametrize("streams", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", MACHINES)
def test_turns_that_cost_something_and_steps_that_hang_decide_nothing_for_long(name, streams):
    """Behind a step of the other kind the caches are cold and windows have to be filled; one step of 20 takes half as long again."""
    machine = replace(MACHINES[name], cold=0.4, fill_s=5e-6)
    best = max(tokens_per_second(policy, machine, streams, hiccups=0.05) for policy in (FixedLength(), NoDrafts()))
    for seed in range(2):
        policy = machine.chosen_lengths(0.05, random.Random(seed))
        assert tokens_per_second(policy, machine, streams, noise=0.1, hiccups=0.05, seed=1) > 0.95 * best


@pytest.mark.parametrize("name", MACHINES)
def test_wrong_curves_are_corrected_by_the_steps_that_are_taken(name):
    """Steps of eight sequences look 60 % dearer or cheaper than they are, drafts the other way round: the first choice is the wrong one."""
    machine = MACHINES[name]
    best = max(tokens_per_second(policy, machine, 8, num_texts=1000) for policy in (FixedLength(), NoDrafts()))
    for wrong in (1.6, 0.4):
        steps, drafts = (Curve.of([(size, seconds(size)) for size in SIZES]) for seconds in (machine.curve_s, machine.propose_s))
        plain = {size: second * wrong if size <= 8 else second for size, second in zip(steps.sizes, steps.seconds, strict=True)}
        cost = CostModel(Curve.of(list(plain.items())), Curve(drafts.sizes, tuple(second / wrong for second in drafts.seconds)))
        assert tokens_per_second(ThroughputLength(cost, MAX_DRAFTS), machine, 8, noise=0.1, num_texts=1000) > 0.94 * best


def test_lengths_that_are_chosen_gain_where_drafts_are_good_in_stretches():
    machine = MACHINES["small model"]
    every, chosen = FixedLength(), machine.chosen_lengths(0.0, random.Random(1))
    assert tokens_per_second(chosen, machine, 4) > 1.03 * tokens_per_second(every, machine, 4)


@pytest.mark.parametrize("name", MACHINES)
def test_lengths_follow_a_load_that_changes(name):
    machine = MACHINES[name]
    policy = machine.chosen_lengths(0.05, random.Random(3))
    for seed, streams in enumerate([1, 16, 1, 8, 2], 10):
        chosen, *others = (
            tokens_per_second(one, machine, streams, noise=0.1, num_texts=80, seed=seed) for one in (policy, FixedLength(), NoDrafts())
        )
        assert chosen > 0.9 * max(others)
