"""Forced accept lengths: the mean and the bounds of the draw, and engines whose steps keep so many drafts whatever the model says."""

import math
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.forced_accept import ForcedAccept, make_forced_accept
from engine.random_keys import DRAW_BITS, Purpose, draws53
from engine.request import Grammar, GrammarKind, Request, SamplingParams, Sequence
from engine.stream import WorkerStream
from hicache.config import HiCacheConfig
from tests.engine.fake_runner import FakeLimits, FakeRunner
from tests.engine.test_engine_model import make_engine as make_model_engine
from tests.engine.test_speculation import prompt, run, tokens
from tests.engine.test_structured_output import make_engine as make_grammar_engine
from tests.engine.test_structured_output import text_of

LENGTHS = st.floats(1, 6, allow_nan=False)
FORCED = {"load_format": "dummy", "prefill_any_interval": 2}
LIMITS = FakeLimits(max_model_len=200, max_num_seqs=8, num_blocks=500, num_state_slots=10, draft_block_size=5)


def sequence(seed: int, position: int) -> Sequence:
    return Sequence(0, Request("a", [2], SamplingParams()), 0.0, seed, [2] * position, 1, 1)


@given(length=LENGTHS, seed=st.integers(0, 2**64 - 1), position=st.integers(1, 10**4), verified=st.integers(0, 5))
def test_a_draw_is_one_of_the_two_counts_around_the_mean_or_all_drafts(length, seed, position, verified):
    [count] = ForcedAccept(length).counts([sequence(seed, position)], [[7] * verified])
    assert count in {min(verified, kept) for kept in (math.floor(length - 1), math.ceil(length - 1))}
    assert [count] == ForcedAccept(length).counts([sequence(seed, position)], [[9] * verified])  # the drafts do not matter


@given(length=LENGTHS)
def test_the_mean_over_all_numbers_is_the_one_asked_for(length):
    """Exactly: the larger count is drawn for a share of the numbers that is the fraction, to 2^-53."""
    forced, fraction = ForcedAccept(length), length % 1
    border = math.ceil(fraction * 2**DRAW_BITS)
    whole = math.floor(length) - 1
    assert forced.drafts_kept(border) == whole
    assert border == 0 or forced.drafts_kept(border - 1) == whole + 1


@settings(deadline=None)
@given(length=LENGTHS, seed=st.integers(0, 2**64 - 1))
def test_the_mean_over_the_positions_of_a_request_is_the_one_asked_for(length, seed):
    count = 4000
    numbers = draws53([seed] * count, list(range(count)), Purpose.ACCEPT).tolist()
    kept = np.mean([ForcedAccept(length).drafts_kept(number) for number in numbers])
    assert abs(1 + kept - length) < 5 * 0.5 / math.sqrt(count)


def make_engine(length: float, stream=None, **changes) -> Engine:
    config = EngineConfig(force_accept_length=length, zero_overhead_scheduling=stream is not None, **FORCED, **changes)
    return Engine(config, HiCacheConfig(size_gb=0), runner=FakeRunner(LIMITS, draft_noise=50.0, record=False), stream=stream)


def requests(count: int = 6, max_tokens: int = 60) -> list[Request]:
    """Greedy ones, sampled ones with and without a seed, one with edits that allow no repetition of the last tokens."""
    kinds = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0}, {"temperature": 0.0, "repetition_penalty": 1.3}]
    return [
        Request(f"{i}", prompt(i), SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kinds[i % len(kinds)])) for i in range(count)
    ]


def mean_length(engine: Engine) -> float:
    spec = engine.stats()["spec"]
    return 1 + spec["accepted_tokens_total"] / spec["drafts_total"]


@pytest.mark.parametrize(("length", "overlapped"), [(1.0, False), (2.8, True), (3.51, False), (6.0, True)])
def test_an_engine_shows_the_forced_mean_whatever_the_model_says(length, overlapped):
    engine = make_engine(length, WorkerStream() if overlapped else None)
    outputs = run(engine, requests())
    engine.close()
    assert all(len(tokens(found)) == 60 for found in outputs.values())
    # Near their ends sequences have less room for drafts: a few of the steps.
    assert mean_length(engine) == pytest.approx(length, abs=0.12)
    counts = {output.accepted for found in outputs.values() for output in found[1:-4]}
    assert counts <= {math.floor(length - 1), math.ceil(length - 1)}


def test_the_same_requests_keep_the_same_drafts_with_and_without_overlap():
    plain = run(make_engine(2.8), requests())
    engine = make_engine(2.8, WorkerStream())
    overlapped = run(engine, requests(), random.Random(4))
    engine.close()
    for name, outputs in plain.items():
        assert [o.token_ids for o in outputs] == [o.token_ids for o in overlapped[name]]


def test_kept_drafts_are_the_tokens_that_come_out():
    engine, drafted = make_engine(4.0), []
    propose = engine.drafter.propose
    engine.drafter.propose = lambda points, rooms: drafted.append(propose(points, rooms)) or drafted[-1]
    outputs = run(engine, [Request("a", prompt(1), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))])["a"]
    for output, [ids] in zip(outputs[1:-2], drafted, strict=False):
        assert output.token_ids[:3] == ids[:3]
        assert len(output.token_ids) == 4


def test_a_draft_without_a_token_is_replaced_and_counted():
    limits = FakeLimits(max_model_len=200, num_blocks=500, draft_block_size=5, tokenizer_size=9)
    config = EngineConfig(force_accept_length=3.0, **FORCED)
    for temperature in (0.0, 1.0):
        engine = Engine(config, HiCacheConfig(size_gb=0), runner=FakeRunner(limits, draft_noise=50.0, record=False))
        outputs = run(engine, [Request("a", [2, 3, 4], SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True))])["a"]
        assert max(tokens(outputs)) < 9
        assert [len(output.token_ids) for output in outputs[1:-2]] == [3] * (len(outputs) - 3)


def test_a_grammar_is_obeyed_and_ends_the_kept_drafts():
    engine = make_grammar_engine(drafts=4, draft_noise=50.0, force_accept_length=4.0, load_format="dummy")
    engine.add_request(
        Request(
            "a", [3, 4, 5], SamplingParams(temperature=1.0, max_tokens=300, seed=1), grammar=Grammar(GrammarKind.REGEX, "(yes|no){3,9}")
        )
    )
    outputs = []
    while not engine.idle or not outputs:
        outputs += engine.step()
    assert not any(output.error for output in outputs)
    assert re.fullmatch("(yes|no){3,9}", text_of(outputs))
    assert any(output.drafted > output.accepted for output in outputs)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_a_real_model_on_a_cpu_shows_the_forced_mean(eager):
    sizes = {"load_format": "dummy", "num_draft_tokens": 4, "max_model_len": 400, "num_blocks": 200, "enforce_eager": eager}
    engine = make_model_engine(force_accept_length=2.8, **sizes)
    engine.runner.native.wait()
    outputs = []
    for i in range(4):  # greedy, coupled and free draws
        params = SamplingParams(temperature=float(i > 0), max_tokens=40, ignore_eos=True, seed=i if i < 2 else None)
        engine.add_request(Request(f"{i}", [5, 6, 7 + i], params))
    while not engine.idle:
        outputs += engine.step()
    assert all(0 <= token < engine.limits.vocab_size for output in outputs for token in output.token_ids)
    assert sum(len(output.token_ids) for output in outputs) == 4 * 40
    assert mean_length(engine) == pytest.approx(2.8, abs=0.15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"force_accept_length": 2.8}, "replaces the verification of a real model"),
        ({"force_accept_length": 2.8, "load_format": "dummy", "spec": False}, "nothing is drafted"),
        ({"force_accept_length": 2.8, "load_format": "dummy", "num_draft_tokens": 0}, "nothing is drafted"),
        ({"force_accept_length": 0.5, "load_format": "dummy"}, "force_accept_length is 0.5"),
        ({"force_accept_length": 6.5, "load_format": "dummy"}, "force_accept_length is 6.5"),
        ({"force_accept_length": -1.0, "load_format": "dummy"}, "force_accept_length"),
        ({"force_accept_length": math.nan, "load_format": "dummy"}, "force_accept_length"),
    ],
)
def test_a_forced_length_is_refused_where_it_means_nothing(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)


def test_a_model_that_drafts_too_little_refuses_it():
    config = EngineConfig(force_accept_length=5.5, load_format="dummy")
    assert make_forced_accept(config, 5) == ForcedAccept(5.5)
    with pytest.raises(ConfigError, match="this model drafts 4 tokens"):
        make_forced_accept(config, 4)
