"""Overlapped scheduling: the same tokens, reasons and accounts as one step after the other, whatever the device's pace."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import FinishReason, Output, Request, SamplingParams
from engine.stream import WorkerStream
from hicache.config import HiCacheConfig
from tests.engine.fake_device import FakeDevice
from tests.engine.fake_runner import FakeLimits, FakeRunner
from tests.engine.test_speculation import prompt, random_requests, tokens

LIMITS = FakeLimits(max_model_len=56, num_blocks=64)


def make_engine(
    stream: Any = None, *, limits: FakeLimits = LIMITS, noise: float = 1.0, hicache: Any = None, on_device: bool = False, **config: Any
) -> Engine:
    """With a stream: overlapped on it. Without: one step after the other. on_device: sampled ids stay there, as on a GPU."""
    runner = FakeRunner(limits, draft_noise=noise)
    changes = {"enable_mtp_varlen": False, "prefill_any_interval": 2, "zero_overhead_scheduling": stream is not None, **config}
    engine = Engine(EngineConfig(**changes), hicache or HiCacheConfig(size_gb=0), runner=runner, stream=stream)
    engine._step_runner._keep_on_device = on_device
    return engine


def serve(engine: Engine, requests: list[Request], rng: random.Random | None = None, aborts: float = 0.0) -> dict[str, list[Output]]:
    """Serve requests to their ends. With `rng` they arrive at random steps and, with probability `aborts` a step, one is aborted."""
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    waiting, open_ = list(requests), []
    while True:
        while waiting and (rng is None or rng.random() < 0.4):
            open_.append(waiting[0].request_id)
            engine.add_request(waiting.pop(0))
        if rng is not None and open_ and rng.random() < aborts:
            engine.abort(rng.choice(open_))
        for output in engine.step():
            assert not outputs[output.request_id] or outputs[output.request_id][-1].finish_reason is None, "tokens behind the end"
            outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                open_.remove(output.request_id)
        if engine.idle and not waiting:
            pools = engine.scheduler.blocks
            assert pools.blocks.num_used == pools.slots.num_used == 0
            assert all(one[-1].finish_reason is not None for one in outputs.values())
            return outputs


def assert_same(got: dict[str, list[Output]], wanted: dict[str, list[Output]]) -> None:
    """Tokens, reasons and log-probabilities; of an aborted request what came before."""
    for name, outputs in wanted.items():
        end = got[name][-1]
        if end.finish_reason is FinishReason.ABORT:
            assert tokens(got[name]) == tokens(outputs)[: len(tokens(got[name]))]
            continue
        assert tokens(got[name]) == tokens(outputs)
        assert (end.finish_reason, end.stop_token_id, end.error) == (
            outputs[-1].finish_reason,
            outputs[-1].stop_token_id,
            outputs[-1].error,
        )
        assert [entry for one in got[name] for entry in one.logprobs] == [entry for one in outputs for entry in one.logprobs]
        assert got[name][0].cached_tokens == outputs[0].cached_tokens


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    block=st.sampled_from([0, 5]),
    num_blocks=st.sampled_from([16, 20, 64]),
    aborts=st.sampled_from([0.0, 0.15]),
    lazy=st.sampled_from([0.0, 0.5, 1.0]),
    stop_preempted=st.booleans(),
)
def test_overlapped_steps_give_what_separate_steps_give(seed, block, num_blocks, aborts, lazy, stop_preempted):
    """lazy: how often the device computes a job only when its result is asked for; otherwise at once."""
    rng = random.Random(seed)
    requests = random_requests(rng, 8)
    limits = replace(LIMITS, draft_block_size=block)
    plain = serve(make_engine(limits=limits), requests)
    engine = make_engine(FakeDevice(lazy=lazy, seed=seed), limits=replace(limits, num_blocks=num_blocks))
    assert_same(serve(engine, requests, rng, aborts), plain)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), plain=st.booleans(), lazy=st.sampled_from([0.5, 1.0]))
def test_tokens_that_stay_on_the_device_are_the_same(seed, plain, lazy):
    """plain: only requests that never need the host between forward pass and draw."""
    rng = random.Random(seed)
    free = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "top_logprobs": 0, "ignore_eos": True}
    requests = random_requests(rng, 8, **(free if plain else {}))
    wanted = serve(make_engine(), requests)
    engine = make_engine(FakeDevice(lazy=lazy, seed=seed), on_device=True, limits=replace(LIMITS, num_blocks=20))
    assert_same(serve(engine, requests, rng, 0.1), wanted)


def test_steady_decode_steps_get_their_tokens_on_the_device():
    engine = make_engine(FakeDevice(lazy=1.0), on_device=True)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    serve(engine, [Request(f"{i}", prompt(i), params) for i in range(3)])
    assert sum(batch.late is not None for batch in engine.runner.batches) > 10


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 3.0]))
def test_requests_without_a_seed_repeat_when_nothing_is_preempted(seed, noise):
    """Rejection depends on where drafted blocks begin, so it needs the same steps, not only the same numbers."""
    requests = random_requests(random.Random(seed), 8, seed=None)
    limits = replace(LIMITS, draft_block_size=5, max_num_seqs=8, num_state_slots=10, num_blocks=200)
    plain = serve(make_engine(limits=limits, noise=noise), requests)
    assert_same(serve(make_engine(FakeDevice(lazy=1.0), limits=limits, noise=noise), requests), plain)


def test_preempted_sequences_are_never_in_flight_and_repeat_their_tokens():
    requests = random_requests(random.Random(4), 7, max_tokens=30, ignore_eos=True, min_tokens=0, stop_token_ids=())
    for block in (0, 5):
        limits = replace(LIMITS, draft_block_size=block)
        engine = make_engine(FakeDevice(lazy=1.0), limits=replace(limits, num_blocks=18))
        assert_same(serve(engine, requests), serve(make_engine(limits=limits), requests))
        assert engine.stats()["preemptions_total"] > 0


def test_the_next_step_is_planned_and_started_before_the_last_one_is_read():
    device = FakeDevice(lazy=1.0)
    engine = make_engine(device)
    engine.add_request(Request("a", prompt(1), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    assert [len(output.token_ids) for output in engine.step()] == [1]  # prompt steps are waited for
    assert engine.step() == []  # the first decode step is on its way
    for _ in range(5):
        assert [len(output.token_ids) for output in engine.step()] == [1]
        assert device.num_open >= 1


def test_a_stop_costs_one_row_that_nobody_reads_and_a_length_limit_none():
    reasons = set()
    for n in range(9):
        request = Request("a", prompt(n), SamplingParams(temperature=0, max_tokens=12))
        engine, plain = make_engine(FakeDevice(lazy=1.0)), make_engine()
        outputs = serve(engine, [request])
        assert_same(outputs, serve(plain, [request]))
        rows = [sum(batch.num_tokens for batch in one.runner.batches) for one in (engine, plain)]
        stopped = outputs["a"][-1].finish_reason is FinishReason.STOP and len(tokens(outputs["a"])) > 1
        assert rows[0] - rows[1] == stopped
        reasons.add(stopped)
    assert reasons == {True, False}


def test_blocks_of_a_sequence_that_ends_in_flight_are_held_until_the_step_has_landed():
    device = FakeDevice(lazy=1.0)
    engine = make_engine(device)
    engine.add_request(Request("a", prompt(1), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    engine.step()
    engine.step()
    engine.abort("a")
    assert engine.scheduler.blocks.blocks.num_used > 0
    [final] = engine.step()
    assert final.finish_reason is FinishReason.ABORT
    assert engine.idle
    assert engine.scheduler.blocks.blocks.num_used == 0


def test_a_request_id_may_be_used_again_while_its_old_step_is_in_flight():
    engine = make_engine(FakeDevice(lazy=1.0))
    request = Request("a", prompt(1), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    wanted = tokens(serve(make_engine(), [request])["a"])
    engine.add_request(request)
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.add_request(request)
    got = [token for _ in range(30) for output in engine.step() for token in output.token_ids]
    assert got[-len(wanted) :] == wanted


def test_invalid_logits_in_flight_fail_only_their_own_request():
    for block in (0, 5):
        engine = make_engine(FakeDevice(lazy=1.0), limits=replace(LIMITS, draft_block_size=block))
        requests = [Request(f"{i}", prompt(i), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for i in range(2)]
        for request in requests:
            engine.add_request(request)
        engine.step()
        engine.step()
        engine.inject_fault("nan")
        outputs: dict[str, list[Output]] = {"0": [], "1": []}
        while not engine.idle:
            for output in engine.step():
                outputs[output.request_id].append(output)
        assert outputs["0"][-1].finish_reason is FinishReason.ERROR
        assert outputs["1"][-1].finish_reason is FinishReason.LENGTH
        assert engine.scheduler.blocks.blocks.num_used == 0


def test_cached_counts_and_stores_are_the_same_with_a_prefix_cache():
    limits = replace(LIMITS, keep_tokens=6, mode="compact", draft_block_size=5)
    hicache = HiCacheConfig(size_gb=0.001, min_restore_tokens=4)
    shared = [2 + i % 29 for i in range(24)]
    requests = [Request(f"{n}", shared[: 16 + 4 * (n % 3)] + prompt(n % 4, 5), SamplingParams(seed=n, max_tokens=9)) for n in range(14)]
    seen = []
    for stream in (None, FakeDevice(lazy=1.0), FakeDevice(lazy=0.5, seed=3)):
        engine = make_engine(stream, limits=limits, hicache=hicache, yoco_mode="compact", yoco_keep_tokens=6)
        outputs = [serve(engine, [request])[request.request_id] for request in requests]
        stats = engine.stats()["prefix_cache"]
        seen.append(([(tokens(one), one[0].cached_tokens) for one in outputs], stats["hits_total"], stats["stores_total"]))
        engine.close()
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1] > 3


# ---- time


@pytest.mark.parametrize("block", [0, 5])
def test_host_time_is_hidden_behind_the_device(block):
    """The clock is the device's and the host's: planning takes 2, reading 1, a forward pass 10, sampling 1."""
    steps = {}
    for overlap in (False, True):
        device = FakeDevice(lazy=1.0, forward_s=10.0, sampling_s=1.0)
        engine = make_engine(device, limits=replace(LIMITS, draft_block_size=block), zero_overhead_scheduling=overlap, noise=0.0)
        schedule, commit = engine.scheduler.schedule, engine.scheduler.commit
        engine.scheduler.schedule = lambda: (device.spend(2.0), schedule())[1]  # noqa: B023
        engine.scheduler.commit = lambda *landed: (device.spend(1.0), commit(*landed))[1]  # noqa: B023
        engine.add_request(Request("a", prompt(1), SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
        for _ in range(3):
            engine.step()
        began, count = device.now, 4
        for _ in range(count):
            assert engine.step()
        steps[overlap] = (device.now - began) / count
    assert steps == {False: 14.0, True: 11.0}


# ---- the thread


def test_a_thread_computes_the_same_and_hands_failures_on():
    requests = random_requests(random.Random(9), 20)
    limits = replace(LIMITS, draft_block_size=5, num_blocks=24)
    plain = serve(make_engine(limits=replace(limits, num_blocks=64)), requests)
    engine = make_engine(WorkerStream(), limits=limits)
    assert_same(serve(engine, requests, random.Random(2)), plain)

    def broken(batch: Any) -> Any:
        raise RuntimeError("the device is lost")

    engine.runner.run = broken
    engine.add_request(requests[0])
    with pytest.raises(RuntimeError, match="the device is lost"):
        serve(engine, requests[1:])
    engine.close()
