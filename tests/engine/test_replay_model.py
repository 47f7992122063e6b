"""Replays in whole engines: an exact one changes no bit, an approximate one stays within its gate, and both save what they say."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.eval_prompts import load_prompts
from engine.models.tiny import ensure_tiny
from engine.tokenizer import Tokenizer
from hicache.config import HiCacheConfig
from hicache.policy import restore_cap
from hicache.replay import ReplayMode
from tests.engine.bench_replay import Trial, make_runner
from tests.engine.simulation import run_ranks
from tests.engine.test_batch_invariance import GPU, answer
from tests.engine.test_batch_invariance import settings as invariant
from tests.engine.test_context_parallel import KEEP, serve

GATE = 0.01  # nats between next-token distributions behind a full and an approximate prefill


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ensure_tiny(tmp_path_factory.mktemp("tiny")))


def edited_prompts(lengths: tuple[int, ...], kept: int) -> list[list[int]]:
    """A prompt, and others that follow it for `kept` tokens."""
    rng = random.Random(7)
    trunk = [rng.randrange(20, 4000) for _ in range(lengths[0])]
    return [trunk, *(trunk[:kept] + [rng.randrange(20, 4000) for _ in range(length - kept)] for length in lengths[1:])]


@pytest.mark.parametrize("path", [pytest.param({}, id="compiled"), pytest.param({"device": "cuda"}, id="graphs", marks=GPU)])
def test_exact_replay_of_the_embedded_model_gives_the_bits_of_a_full_prefill(tiny: str, path: dict[str, str]) -> None:
    """In batch-invariant mode, which promises them. The third prompt finds the state that the replay of the second has left."""
    prompts = edited_prompts((1400, 1400, 1350), kept=1100)
    found: dict[str, list[Any]] = {}
    for mode in ("off", "exact"):
        config = invariant(tiny, spec=False, max_num_seqs=4, num_blocks=60, **path)
        engine = Engine(config, HiCacheConfig(size_gb=0.05, replay=mode, audit="full"))
        assert path or engine.runner.native.wait()  # type: ignore[attr-defined]
        rows: list[torch.Tensor] = []
        found[mode] = [answer(engine, ids, str(number), rows) for number, ids in enumerate(prompts)]
        found[f"{mode} rows"] = [row for part in rows for row in part]
        stats = engine.stats()["prefix_cache"]
        assert stats["replayed_tokens_total"] == (640 if mode == "exact" else 0)
        assert stats["checksum_errors_total"] == 0
        engine.close()
    assert [tokens for tokens, _ in found["exact"]] == [tokens for tokens, _ in found["off"]]
    assert [cached for _, cached in found["off"]] == [0, 0, 1024]
    assert [cached for _, cached in found["exact"]] == [0, 1024 - 640, 1024]
    assert torch.equal(torch.stack(found["exact rows"]), torch.stack(found["off rows"]))


def test_bounded_replay_of_the_embedded_model_answers_held_out_prompts_within_the_gate(tiny: str) -> None:
    runner, tokenizer = make_runner(tiny), Tokenizer.from_dir(tiny)
    chosen = [prompt for prompt in load_prompts()[0] if prompt.set in ("recall_500", "document_500", "tool_answer")]
    long_ids = [ids for ids in (tokenizer.encode(prompt.render()) for prompt in chosen) if len(ids) >= 400][:4]
    assert len(long_ids) == 4
    for ids in long_ids:
        divergence, same = Trial(runner, ids).divergence(ReplayMode.BOUNDED, restore_cap(len(ids), 140, 128))
        assert divergence.max() <= GATE
        assert same.all()


def test_bounded_replay_saves_a_long_prompt_and_leaves_the_cache_as_it_was(tiny: str) -> None:
    prompts = edited_prompts((2500, 2500), kept=2300)
    config = EngineConfig(model=tiny, device="cpu", yoco_mode="compact", yoco_keep_tokens=140, max_num_seqs=2, num_blocks=60)
    engine = Engine(config, HiCacheConfig(size_gb=0.05, replay="bounded", audit="full"))
    answer(engine, prompts[0], "first", [])
    before = engine.stats()["prefix_cache"]
    _, cached = answer(engine, prompts[1], "second", [])
    after = engine.stats()["prefix_cache"]
    assert cached == 2300 // 128 * 128 - 128
    assert after["state_hits_total"] == {"bounded_replay": 1}
    assert after["stores_total"] == before["stores_total"]
    engine.close()


@pytest.mark.parametrize("path", [{}, {"enforce_eager": True}], ids=["compiled", "torch"])
def test_replay_reaches_all_ranks_that_prefill_together(path: dict[str, Any]) -> None:
    rng = random.Random(3)
    trunk = [rng.randrange(3, 400) for _ in range(220)]
    prompts = [trunk, trunk[:150] + [rng.randrange(3, 400) for _ in range(80)]]
    config = {**KEEP, **path, "max_num_batched_tokens": 70, "max_num_seqs": 1}
    hicache = HiCacheConfig(size_gb=0.02, min_restore_tokens=16, segment="private", replay="exact", herd_min_tokens=0)
    [(plain, _, _)] = run_ranks(1, lambda group: serve(group, prompts, **config))
    [(alone, hits, _)] = run_ranks(1, lambda group: serve(group, prompts, hicache, **config))

    def rank_main(group: Any) -> Any:
        return serve(group, prompts if group.rank else [], hicache, cp=2, num_blocks=160, **config)

    _, (together, cached, stats) = run_ranks(2, rank_main)
    assert together == alone == plain
    assert cached == hits == [0, 144 - 80]
    assert stats["prefix_cache"]["replayed_tokens_total"] == 80


def test_engine_that_promises_equal_bits_refuses_approximate_windows(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"hicache.replay is bounded"):
        Engine(invariant(tiny), HiCacheConfig(replay="bounded"))
