"""Random traffic on one rank: rules of every step, no leak, one final output each, undisturbed tokens."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import FinishReason, Output, Sequence
from engine.scheduler import Scheduler
from tests.engine.simulation import RecordingCache, drain, expected_tokens, finals_of, make_scheduler, make_sequence, run_step, tokens_of


@dataclass
class Traffic:
    """What was sent, what was aborted and what came out."""

    scheduler: Scheduler
    sent: dict[str, Sequence] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    outputs: list[Output] = field(default_factory=list)

    def send(self, length: int, max_tokens: int) -> None:
        seq = make_sequence(f"r{len(self.sent)}", length, max_tokens)
        self.sent[seq.request.request_id] = seq
        self.scheduler.add(seq)

    def abort(self, choice: int) -> None:
        alive = [seq.request.request_id for seq in (*self.scheduler.waiting, *self.scheduler.running)]
        if alive:
            name = alive[choice % len(alive)]
            self.aborted.add(name)
            assert self.scheduler.abort(name)

    def step(self) -> None:
        self.outputs += run_step(self.scheduler)[1]

    def check(self) -> None:
        """After draining: everything is free and every request has one final output and the tokens of an undisturbed run."""
        self.outputs += drain(self.scheduler)
        assert self.scheduler.blocks.blocks.num_used == self.scheduler.blocks.slots.num_used == 0
        limits = self.scheduler.limits
        for name, seq in self.sent.items():
            [final] = finals_of(self.outputs, name)
            tokens, expected = tokens_of(self.outputs, name), expected_tokens(seq, limits.max_model_len)
            assert [o for o in self.outputs if o.request_id == name][-1] is final
            if final.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert tokens == expected
            else:
                assert tokens == expected[: len(tokens)]
                assert (final.finish_reason is FinishReason.ABORT) == (name in self.aborted)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 50), st.integers(1, 30)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.just(("step",)),
        st.just(("step",)),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(
    actions=actions,
    num_blocks=st.integers(3, 24),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 24),
    any_=st.sampled_from([1, 2, 7]),
    chunked=st.booleans(),
    stop_preempted=st.booleans(),
    checkpoint=st.integers(0, 12),
)
def test_any_traffic_ends_cleanly(actions, num_blocks, max_num_seqs, budget, any_, chunked, stop_preempted, checkpoint):
    cache = RecordingCache()
    if checkpoint:
        cache.checkpoints = lambda seq: list(range(checkpoint, 60, checkpoint))
    scheduler = make_scheduler(
        cache=cache,
        any_=any_,
        attempt=5,
        num_blocks=num_blocks,
        num_state_slots=max_num_seqs + 2,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        chunked_prefill=chunked,
        stop_preempted_request=stop_preempted,
    )
    traffic = Traffic(scheduler)
    for name, *arguments in actions:
        getattr(traffic, name)(*arguments)
    traffic.check()
    admitted = {call[1] for call in cache.calls if call[0] == "restore"}
    finished = {call[1] for call in cache.calls if call[0] == "finish"}
    assert admitted <= finished


def soak(steps: int, seed: int) -> None:
    rng = random.Random(seed)
    traffic = Traffic(make_scheduler(any_=2, num_blocks=24, max_num_seqs=5))
    for _ in range(steps):
        if rng.random() < 0.12 and len(traffic.scheduler.waiting) < 20:
            traffic.send(rng.randint(1, 48), rng.randint(1, 40))
        if rng.random() < 0.02:
            traffic.abort(rng.randrange(100))
        traffic.step()
        if len(traffic.sent) > 200:
            traffic.check()
            traffic.sent, traffic.aborted, traffic.outputs = {}, set(), []
    traffic.check()
    assert traffic.scheduler.counters.preemptions > steps // 1000


def test_no_leak_in_ten_thousand_steps():
    soak(10_000, seed=1)


@pytest.mark.slow
def test_no_leak_in_a_million_steps():
    soak(1_000_000, seed=2)
