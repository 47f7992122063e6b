"""What a length policy hears of the steps that are computed: rows, sequences, and seconds by a fake clock."""

import random

import pytest

from engine.spec_lengths import FixedLength
from tests.engine.fake_runner import FakeLimits
from tests.engine.test_speculation import make_engine, random_requests, run

LIMITS = FakeLimits(max_model_len=100, num_blocks=200, max_num_seqs=3, draft_block_size=5)
ROW_S, DRAFT_S, SAMPLE_S, BETWEEN_S = 0.001, 0.25, 0.5, 9.0


class Listener(FixedLength):
    """Drafts in every other step, all that has room."""

    def __init__(self):
        self.steps, self.drafts = [], []
        self.asked = self.rested = 0

    def rests(self, num_seqs):
        rests = len(self.steps) % 5 == 4
        self.rested += rests
        return rests

    def budget(self, rates, rooms):
        self.asked += 1
        return None if self.asked % 2 else 0

    def observe_cost(self, rows, num_seqs, seconds):
        self.steps.append((rows, num_seqs, seconds))

    def observe_draft(self, num_seqs, seconds):
        self.drafts.append((num_seqs, seconds))


@pytest.fixture
def heard(monkeypatch):
    """The policy of an engine that has served three greedy requests, and the batches that its runner saw."""
    now = [0.0]

    def taking(seconds_of, call):
        def timed(*args):
            now[0] += seconds_of(*args)
            return call(*args)

        return timed

    engine = make_engine(2.0, limits=LIMITS)
    engine.drafter.policy = policy = Listener()
    steps, runner = engine._step_runner, engine.runner
    steps.time_with(lambda: now[0])
    monkeypatch.setattr(runner, "run_greedy", taking(lambda batch: ROW_S * batch.num_tokens, runner.run_greedy))
    monkeypatch.setattr(runner, "draft_greedy", taking(lambda slices: DRAFT_S * len(slices), runner.draft_greedy))
    monkeypatch.setattr(steps.sampler, "verify", taking(lambda *_: SAMPLE_S, steps.sampler.verify))
    monkeypatch.setattr(engine.scheduler, "schedule", taking(lambda: BETWEEN_S, engine.scheduler.schedule))
    plain = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20, "stop_token_ids": (), "top_logprobs": 0}
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "seed": None}
    run(engine, random_requests(random.Random(1), 3, **plain, **neutral))
    return policy, [batch for batch in runner.batches if batch.kind != "prefill"]


def test_a_policy_hears_of_every_decode_step_with_its_rows_and_sequences(heard):
    policy, batches = heard
    assert [step[:2] for step in policy.steps] == [(batch.num_tokens, len(batch.slices)) for batch in batches]
    assert any(rows > num_seqs for rows, num_seqs, _ in policy.steps)
    assert any(rows == num_seqs for rows, num_seqs, _ in policy.steps)


def test_a_step_is_timed_with_its_sampling_and_without_drafts_and_scheduling(heard):
    policy, _ = heard
    for rows, num_seqs, seconds in policy.steps:
        assert seconds == pytest.approx(ROW_S * rows + (SAMPLE_S if rows > num_seqs else 0.0))


def test_drafts_are_timed_by_themselves_and_only_where_some_were_made(heard):
    policy, _ = heard
    assert len(policy.drafts) == sum(rows > num_seqs for rows, num_seqs, _ in policy.steps)
    assert all(seconds == pytest.approx(DRAFT_S * num_seqs) for num_seqs, seconds in policy.drafts)


def test_a_step_that_rests_is_planned_without_a_look_at_its_sequences(heard):
    """Points and rates of every sequence, made in vain, took 2 % of a plain step of eight sequences."""
    policy, batches = heard
    assert 0 < policy.rested <= len(batches) - policy.asked
