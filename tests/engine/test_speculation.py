"""The engine with drafts: the same tokens as without, whatever disturbs it."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import FinishReason, Output, Request, SamplingParams, Status
from hicache.config import HiCacheConfig
from tests.engine.fake_runner import FakeLimits, FakeRunner, expected_greedy
from tests.engine.simulation import make_scheduler, make_sequence

LIMITS = FakeLimits(max_model_len=56, num_blocks=64, draft_block_size=5)


def make_engine(noise: float = 2.0, *, limits: FakeLimits = LIMITS, **config: Any) -> Engine:
    runner = FakeRunner(limits, draft_noise=noise)
    settings = {"enable_mtp_varlen": False, "prefill_any_interval": 2, **config}
    return Engine(EngineConfig(**settings), HiCacheConfig(size_gb=0), runner=runner)


def run(engine: Engine, requests: list[Request], arrive: random.Random | None = None) -> dict[str, list[Output]]:
    """Serve requests to their ends; with `arrive` they come in at random steps."""
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while True:
        while waiting and (arrive is None or arrive.random() < 0.4):
            engine.add_request(waiting.pop(0))
        for output in engine.step():
            outputs[output.request_id].append(output)
        if engine.idle and not waiting:
            return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def prompt(number: int, length: int = 6) -> list[int]:
    return [2 + (7 * number + 3 * i * i) % 29 for i in range(length)]


def random_requests(rng: random.Random, count: int, **fixed: Any) -> list[Request]:
    requests = []
    for i in range(count):
        params = {
            "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
            "top_p": rng.choice([1.0, 0.9]),
            "top_k": rng.choice([-1, 8]),
            "seed": rng.randrange(2**63),
            "max_tokens": rng.randint(1, 30),
            "ignore_eos": rng.random() < 0.3,
            "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
            "frequency_penalty": rng.choice([0.0, 0.0, 0.7]),
            "stop_token_ids": rng.choice([(), (5,)]),
            "top_logprobs": rng.choice([0, 0, 2]),
            **fixed,
        }
        params["min_tokens"] = rng.randint(0, params["max_tokens"]) if rng.random() < 0.3 else 0
        requests.append(Request(f"{i}", prompt(rng.randrange(50), rng.randint(1, 20)), SamplingParams(**params)))
    return requests


def assert_same(got: dict[str, list[Output]], wanted: dict[str, list[Output]]) -> None:
    for name, outputs in wanted.items():
        assert tokens(got[name]) == tokens(outputs)
        assert got[name][-1].finish_reason is outputs[-1].finish_reason
        assert got[name][-1].stop_token_id == outputs[-1].stop_token_id
        assert [entry for output in got[name] for entry in output.logprobs] == [entry for output in outputs for entry in output.logprobs]


# ---- greedy


def test_perfect_drafts_are_all_kept_and_the_tokens_are_the_plain_ones():
    engine = make_engine(noise=0.0)
    request = Request("a", prompt(1), SamplingParams(temperature=0, max_tokens=25, ignore_eos=True))
    outputs = run(engine, [request])["a"]
    plain = run(make_engine(spec=False), [request])["a"]
    assert tokens(outputs) == tokens(plain)
    # One token of the prefill, then blocks of five drafts and a token behind them.
    assert [len(output.token_ids) for output in outputs] == [1, 6, 6, 6, 6]
    assert [(output.drafted, output.accepted) for output in outputs] == [(0, 0)] + [(5, 5)] * 4


def test_the_first_step_behind_the_prompt_verifies_already():
    engine = make_engine(noise=0.0)
    engine.add_request(Request("a", prompt(2), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    assert [len(output.token_ids) for _ in range(2) for output in engine.step()] == [1, 6]


def test_eos_inside_a_block_ends_the_sequence_there():
    for number in range(40):
        request = Request("a", prompt(number), SamplingParams(temperature=0, max_tokens=40))
        wanted = expected_greedy(prompt(number), 40, LIMITS)
        outputs = run(make_engine(noise=0.0), [request])["a"]
        assert tokens(outputs) == wanted
        assert outputs[-1].accepted <= len(outputs[-1].token_ids)


def test_drafts_behind_a_drafted_end_are_not_verified():
    number = next(n for n in range(200) if len(expected_greedy(prompt(n), 40, LIMITS)) in (3, 4, 5))
    engine = make_engine(noise=0.0)
    outputs = run(engine, [Request("a", prompt(number), SamplingParams(temperature=0, max_tokens=40))])["a"]
    left = len(expected_greedy(prompt(number), 40, LIMITS)) - 1
    assert [(output.drafted, output.accepted) for output in outputs] == [(0, 0), (left, left)]


def test_computed_tokens_never_include_the_newest_one():
    """The newest token's cache rows are written by the next step: whoever stores a prefix must not count them."""
    engine = make_engine(noise=1.0)
    for request in random_requests(random.Random(6), 3, ignore_eos=True, max_tokens=30, min_tokens=0, stop_token_ids=()):
        engine.add_request(request)
    while not engine.idle:
        engine.step()
        assert all(seq.num_computed == len(seq.token_ids) - 1 for seq in engine.scheduler.running)


def test_blocks_of_refused_drafts_are_returned_before_anybody_is_preempted():
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=2)
    first, second = make_sequence("a", 8, max_tokens=20), make_sequence("b", 7, max_tokens=20)
    for seq, count in ((first, 2), (second, 4)):  # `second` owns two blocks more than its tokens need
        scheduler.blocks.allocate(seq, 4 * count)
        seq.status = Status.RUNNING
        scheduler.running.append(seq)
    first.token_ids.append(3)
    held = scheduler.blocks.blocks.allocate(scheduler.blocks.blocks.num_free)
    scheduler._decode.grow_tables()
    assert (len(first.block_table), len(second.block_table), scheduler.counters.preemptions) == (3, 2, 0)
    assert scheduler.blocks.blocks.num_used == 5 + len(held)


def test_drafts_never_pass_the_length_limits():
    limits = replace(LIMITS, max_model_len=20)
    for max_tokens in range(1, 18):
        request = Request("a", prompt(3), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        outputs = run(make_engine(noise=0.0, limits=limits), [request])["a"]
        wanted = run(make_engine(spec=False, limits=limits), [request])["a"]
        assert tokens(outputs) == tokens(wanted)
        assert outputs[-1].finish_reason is FinishReason.LENGTH


# ---- coupled: sampled requests with a seed


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 1.0, 4.0]), num_blocks=st.sampled_from([18, 24, 64]))
def test_coupled_output_equals_plain_output_under_random_batching_and_preemption(seed, noise, num_blocks):
    rng = random.Random(seed)
    requests = random_requests(rng, 20)
    limits = replace(LIMITS, num_blocks=num_blocks)
    plain = run(make_engine(spec=False), requests)
    assert_same(run(make_engine(noise, limits=limits), requests, arrive=rng), plain)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_coupled_output_equals_plain_output_on_a_thousand_requests():
    rng = random.Random(5)
    requests = random_requests(rng, 1000)
    plain = run(make_engine(spec=False), requests)
    engine = make_engine(2.0, limits=replace(LIMITS, num_blocks=20))
    assert_same(run(engine, requests, arrive=rng), plain)
    stats = engine.stats()
    assert stats["preemptions_total"] > 20
    assert 0.03 < stats["spec"]["accepted_tokens_total"] / stats["spec"]["draft_tokens_total"] < 0.95


def test_preemption_is_forced_in_the_small_pool():
    requests = random_requests(random.Random(1), 12, max_tokens=30, ignore_eos=True, min_tokens=0, stop_token_ids=())
    engine = make_engine(2.0, limits=replace(LIMITS, num_blocks=18))
    run(engine, requests)
    assert engine.stats()["preemptions_total"] > 0
    assert engine.scheduler.blocks.blocks.num_used == 0


def test_aborts_between_steps_leave_the_others_alone():
    rng = random.Random(3)
    requests = random_requests(rng, 30)
    plain = run(make_engine(spec=False), requests)
    engine = make_engine(1.0, limits=replace(LIMITS, num_blocks=24))
    aborted = {f"{i}" for i in range(0, 30, 3)}
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while True:
        if waiting:
            engine.add_request(waiting.pop(0))
        if aborted and rng.random() < 0.3:
            engine.abort(rng.choice(sorted(aborted)))
        for output in engine.step():
            outputs[output.request_id].append(output)
        if engine.idle and not waiting:
            break
    for name, wanted in plain.items():
        got = tokens(outputs[name])
        assert got == (tokens(wanted)[: len(got)] if name in aborted else tokens(wanted))
    assert engine.scheduler.blocks.blocks.num_used == engine.scheduler.blocks.slots.num_used == 0


# ---- accounting


def test_counters_add_up():
    requests = random_requests(random.Random(8), 30)
    engine = make_engine(2.0)
    outputs = [output for one in run(engine, requests).values() for output in one]
    spec = engine.stats()["spec"]
    assert spec["draft_tokens_total"] == sum(output.drafted for output in outputs) > 0
    assert spec["accepted_tokens_total"] == sum(output.accepted for output in outputs) > 0
    assert spec["drafts_total"] == sum(output.drafted > 0 for output in outputs)
    verified, accepted = spec["verified_by_place_total"], spec["accepted_by_place_total"]
    assert list(verified) == list(accepted) == ["1", "2", "3", "4", "5"]
    assert list(accepted.values()) == sorted(accepted.values(), reverse=True)
    assert all(accepted[place] <= verified[place] for place in verified)


def test_without_speculation_nothing_is_drafted():
    engine = make_engine(spec=False)
    run(engine, random_requests(random.Random(2), 5))
    assert engine.drafter is None
    assert engine.runner.num_drafts == 0
    assert engine.stats()["spec"]["drafts_total"] == 0


def test_invalid_logits_fail_only_the_sequence_that_reaches_them():
    engine = make_engine(noise=0.0)
    requests = [Request(f"{i}", prompt(i), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for i in range(2)]
    for request in requests:
        engine.add_request(request)
    engine.step()
    engine.inject_fault("nan")
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["0"].finish_reason is FinishReason.ERROR
    assert outputs["0"].token_ids == []
    assert len(outputs["1"].token_ids) == 6
