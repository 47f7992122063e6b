"""The whole engine with a cache under pressure: aborts, preemption and eviction change no answer and leak nothing."""

from __future__ import annotations

import random

import pytest

from engine.engine import Engine
from engine.prefix_cache import PrefixCache
from engine.request import FinishReason, Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.engine.test_prefix_cache import assert_idle
from tests.engine.test_prefix_cache_model import BLOCK, make_config


def make_engine(size_gb: float) -> Engine:
    config = make_config(num_blocks=20, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200)
    return Engine(config, HiCacheConfig(size_gb=size_gb, audit="full", min_restore_tokens=BLOCK, herd_min_tokens=32))


def serve(engine: Engine, prompts: list[list[int]], aborted: set[int], *, at_once: int = 5) -> tuple[list[list[int]], list[int]]:
    """Answers and cached tokens in prompt order; requests in `aborted` are cut off one step after they were added."""
    answers: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    finished: set[int] = set()
    added = 0
    while len(finished) < len(prompts):
        while added < len(prompts) and added - len(finished) < at_once:
            params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
            engine.add_request(Request(str(added), prompts[added], params))
            added += 1
        for at in aborted & set(range(added)) - finished:
            if engine.stats()["steps_total"] % 3 == at % 3:
                engine.abort(str(at))
        for output in engine.step():
            at = int(output.request_id)
            answers[at] += output.token_ids
            cached[at] = cached[at] if output.cached_tokens is None else output.cached_tokens
            if output.finish_reason is not None:
                assert output.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT), output.error
                finished.add(at)
    return answers, cached


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    trunks = [[rng.randrange(3, 500) for _ in range(110)] for _ in range(2)]
    return [rng.choice(trunks)[: rng.randrange(50, 111)] + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 30))] for _ in range(24)]


def test_answers_are_those_of_an_engine_without_cache(prompts: list[list[int]]) -> None:
    aborted = {3, 8, 14}
    plain, none_cached = serve(make_engine(0), prompts, set())
    engine = make_engine(0.0004)
    cache = engine.cache
    assert isinstance(cache, PrefixCache)
    answers, cached = serve(engine, prompts, aborted)
    for at, (answer, expected) in enumerate(zip(answers, plain, strict=True)):
        assert answer == (expected[: len(answer)] if at in aborted else expected), f"prompt {at}"
    assert sum(none_cached) == 0
    stats = engine.stats()
    assert stats["prefix_cache"]["hit_tokens_total"] == sum(cached) > 0
    assert stats["prefix_cache"]["evictions_total"] > 0
    assert stats["preemptions_total"] > 0
    assert stats["prefix_cache"]["checksum_errors_total"] == 0
    assert len(cache._herd.in_flight) == 0
    assert_idle(cache)
