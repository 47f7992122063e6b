"""The simulator against recorded sessions and against the live cache."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hicache.simulate import SimulatedCache, TracePrompt, simulate, trace_prompts
from tests.engine.test_prefix_cache import BLOCK, KEEP, make_cache, next_prompt, run
from tests.hicache.fake_kv import FakeKV

TRACES = sorted((Path(__file__).parents[1] / "golden" / "agentx" / "traces").glob("*.json"))


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_recorded_sessions_hit_99_percent_of_what_any_cache_could(path: Path) -> None:
    prompts = list(trace_prompts(json.loads(path.read_text())))
    result = simulate(prompts, SimulatedCache(num_frames=10_000))
    assert result.requests == len(prompts) > 5
    assert result.hit_tokens > 0
    assert result.share_of_oracle >= 0.99
    for mode in ("bounded", "exact"):  # the states lie where they are needed: replays add nothing
        assert simulate(prompts, SimulatedCache(num_frames=10_000, replay=mode)) == result


def test_prompts_of_a_trace_are_equal_exactly_where_their_blocks_are() -> None:
    requests = [{"t": 1, "in": 10, "hash_ids": [0, 1]}, {"t": 0, "in": 9, "hash_ids": [0, 2]}]
    document = {"id": "s", "block_size": 4, "tool_tokens": 3, "system_tokens": 1, "requests": [{"t": 0, "requests": requests}]}
    early, late = trace_prompts(document)
    assert (len(early.tokens), len(late.tokens), late.anchor_tokens) == (9, 10, 4)
    assert early.tokens[:4] == late.tokens[:4]
    assert not set(early.tokens[4:]) & set(late.tokens[4:])


@pytest.mark.parametrize(("mode", "first_hit", "second_hit"), [("off", 0, 5888), ("bounded", 5888 - 128, 0), ("exact", 5888 - 2560, 5888)])
def test_pages_far_beyond_the_last_state_are_what_a_replay_adds(mode: str, first_hit: int, second_hit: int) -> None:
    """What the first visitor of a place computes from a right window leaves a state there for the second."""
    trunk = list(range(9000))
    prompts = [TracePrompt(tokens) for tokens in (trunk, trunk[:6000] + [1] * 3000, trunk[:6000] + [2] * 3000)]
    shape = SimulatedCache(num_frames=10_000, state_interval_tokens=0, replay=mode)
    first, both = simulate(prompts[:2], shape), simulate(prompts, shape)
    assert first.hit_tokens == first.replay_tokens == first_hit
    assert both.hit_tokens == first_hit + second_hit
    assert both.replays == (mode != "off")


@pytest.mark.parametrize("replay", ["off", "bounded", "exact"])
@pytest.mark.parametrize("num_frames", [20, 45, 90, 2000])
@pytest.mark.parametrize("seed", range(3))
def test_simulator_and_live_cache_report_the_same_hits_and_evictions(num_frames: int, seed: int, replay: str) -> None:
    rng = random.Random(seed)
    kv = FakeKV(num_blocks=40, window=2, num_encoder_layers=8)
    cache = make_cache(kv, num_frames=num_frames, replay=replay)
    prompts: list[list[int]] = []
    for _ in range(80):
        prompts.append(next_prompt(rng, prompts[-8:]))
    hits = sum(run(cache, tokens).cached_tokens or 0 for tokens in prompts)
    shape = SimulatedCache(num_frames, BLOCK, -(-kv.state_bytes // 4096), KEEP, 1, replay=replay, window=2, encoder_layers=8)
    result = simulate([TracePrompt(tokens) for tokens in prompts], shape)
    assert result.hit_tokens == hits > 0
    stats = cache.stats()
    assert result.evicted_pages == stats["evictions_total"]
    assert result.replays == stats["state_hits_total"].get(f"{replay}_replay", 0)
