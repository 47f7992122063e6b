"""The prefix cache on a real model of the architecture: a hit must not change what the model says."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.prefix_cache import PrefixCache
from engine.request import Request, SamplingParams, Sequence
from hicache.config import HiCacheConfig

CHECKPOINT = Path(__file__).parents[1] / "golden" / "model" / "tiny-a-bf16"
BLOCK, KEEP, CHUNK = 16, 24, 64
NEW_TOKENS = 4


def make_config(
    *, yoco_mode: str = "compact", num_blocks: int = 80, max_num_seqs: int = 2, max_num_batched_tokens: int = 512, max_model_len: int = 600
) -> EngineConfig:
    torch.set_num_threads(1)
    return EngineConfig(
        model=str(CHECKPOINT),
        device="cpu",
        precision="F",
        num_threads=1,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        yoco_mode=yoco_mode,
        yoco_keep_tokens=KEEP,
        num_draft_tokens=3,
        enable_mtp_varlen=False,  # lengths by measured cost would make every run another one
    )


def make_runner(mode: str) -> ModelRunner:
    return ModelRunner(make_config(yoco_mode=mode))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner("compact")


def make_cache(runner: ModelRunner, **knobs: object) -> PrefixCache:
    config = HiCacheConfig(min_restore_tokens=BLOCK, **{"audit": "full", **knobs})  # type: ignore[arg-type]
    return PrefixCache(config, runner.kv, runner.limits.fingerprint, KEEP, num_bytes=8 * 2**20)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    prompts = json.loads((CHECKPOINT.parent / "prompts.json").read_text())
    return max((p["token_ids"] for p in prompts), key=len)


class Driver:
    """One sequence at a time through the runner, with the cache as the scheduler uses it."""

    def __init__(self, runner: ModelRunner, cache: PrefixCache, chunk: int = CHUNK) -> None:
        self.runner, self.cache, self.chunk, self.ids = runner, cache, chunk, 0

    def sequence(self, tokens: list[int], use_cache: bool) -> Sequence:
        self.ids += 1
        request = Request(str(self.ids), tokens, SamplingParams(), cache_read=use_cache, cache_write=use_cache)
        seq = Sequence(self.ids, request, 0.0, 0, list(tokens), len(tokens), len(tokens))
        first = 1 + (self.ids % 2) * 38  # other blocks and slots than the sequence before
        seq.block_table, seq.state_slot = list(range(first, first + 37)), 1 + self.ids % 2
        return seq

    def step(self, seq: Sequence, kind: StepKind, start: int, end: int, total: int) -> torch.Tensor:
        history = tuple(seq.token_ids[max(0, start - self.runner.limits.ngram_history) : start])
        rows = LogitRows.LAST if end == total else LogitRows.NONE
        piece = SequenceSlice(seq.token_ids[start:end], start, total, seq.block_table, seq.state_slot, history, logit_rows=rows)
        return self.runner.run(Batch(kind, [piece]))

    def run(self, tokens: list[int], use_cache: bool = True, new_tokens: int = NEW_TOKENS) -> tuple[int, torch.Tensor, list[int]]:
        """Returns cached tokens, logits [new_tokens, V] and the greedy continuation."""
        seq = self.sequence(tokens, use_cache)
        self.cache.restore(seq, self.cache.plan(seq))
        marks = self.cache.checkpoints(seq)
        while seq.num_computed < seq.prefill_len:
            start = seq.num_computed
            stop = (start // self.chunk + 1) * self.chunk  # boundaries at the same positions, hit or cold
            end = min([seq.prefill_len, stop, *(p for p in marks if p > start)])
            logits = self.step(seq, StepKind.PREFILL, start, end, seq.prefill_len)
            self.cache.store_chunk(seq, start, end)
            seq.num_computed = end
        all_logits = [logits[0]]
        for _ in range(new_tokens - 1):
            seq.token_ids.append(int(all_logits[-1].argmax()))
            at = len(seq.token_ids) - 1
            all_logits.append(self.step(seq, StepKind.DECODE, at, at + 1, at + 1)[0])
        generated = [*seq.token_ids[len(tokens) :], int(all_logits[-1].argmax())]
        self.cache.finish(seq)
        return seq.cached_tokens or 0, torch.stack(all_logits), generated


def predicted(num_tokens: int, earlier: list[int]) -> int:
    """The rule: the deepest s0 or s1 of the earlier prefills that leaves the kept tokens."""
    cap = (num_tokens - KEEP) // BLOCK * BLOCK
    states = [s for n in earlier for s in ((n - KEEP) // BLOCK * BLOCK, (n - 1) // BLOCK * BLOCK)]
    return max((s for s in states if 0 < s <= cap), default=0)


@pytest.mark.parametrize("length", [BLOCK * 3 - 1, BLOCK * 3, BLOCK * 6 + KEEP - 1, BLOCK * 6 + KEEP, BLOCK * 6 + KEEP + 1, 300])
def test_identical_prompt_gives_the_same_logits_from_the_cache(runner: ModelRunner, prompt: list[int], length: int) -> None:
    driver = Driver(runner, make_cache(runner))
    tokens = prompt[:length]
    _, cold, expected = driver.run(tokens, use_cache=False)
    assert driver.run(tokens)[0] == 0
    cached, hit, generated = driver.run(tokens)
    assert cached == predicted(length, [length])
    torch.testing.assert_close(hit, cold, atol=1e-4, rtol=0)
    assert generated == expected


@pytest.mark.parametrize("mode", ["compact", "mask"])
def test_growing_conversation_gives_the_same_logits_from_the_cache(mode: str, prompt: list[int]) -> None:
    runner = make_runner(mode)
    driver, rng = Driver(runner, make_cache(runner)), random.Random(1)
    tokens, earlier = prompt[:90], []
    hits = 0
    for growth in (3, 17, 30, 64, 5):
        _, cold, expected = driver.run(tokens, use_cache=False)
        cached, hit, generated = driver.run(tokens)
        assert cached == predicted(len(tokens), earlier)
        torch.testing.assert_close(hit, cold, atol=1e-4, rtol=0)
        assert generated == expected
        hits += cached > 0
        earlier.append(len(tokens))
        tokens = tokens + [rng.randrange(3, 500) for _ in range(growth)]
    assert hits == 4


def test_branches_edits_and_eviction_give_the_same_tokens_as_no_cache(runner: ModelRunner, prompt: list[int]) -> None:
    cache = make_cache(runner)
    cache.cache.pool.take(cache.cache.pool.num_free - 6 * cache.cache.frames_per_state - 12)  # a small arena, so that entries are evicted
    driver, rng = Driver(runner, cache), random.Random(2)
    history, hits = [prompt[:200]], 0
    for _ in range(9):
        base = rng.choice(history)
        tokens = base[: rng.randrange(60, len(base) + 1)] + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 50))]
        tokens = tokens[:300]
        _, cold, expected = driver.run(tokens, use_cache=False, new_tokens=3)
        cached, hit, generated = driver.run(tokens, new_tokens=3)
        torch.testing.assert_close(hit, cold, atol=1e-4, rtol=0)
        assert generated == expected
        hits += cached > 0
        history.append(tokens)
    assert hits > 2
    assert cache.stats()["evictions_total"] > 0


@pytest.mark.parametrize("keep_modulus", [0, 5])
def test_hit_is_bit_identical_when_the_chunk_boundaries_coincide(runner: ModelRunner, prompt: list[int], keep_modulus: int) -> None:
    driver = Driver(runner, make_cache(runner), chunk=BLOCK)
    tokens = prompt[: 200 + keep_modulus]
    _, cold, _ = driver.run(tokens, use_cache=False)
    driver.run(tokens)
    cached, hit, _ = driver.run(tokens)
    assert cached > 0
    assert hit.equal(cold)


@pytest.mark.parametrize("target", ["page", "state"])
def test_one_flipped_exponent_byte_changes_the_answer_when_no_audit_looks(runner: ModelRunner, prompt: list[int], target: str) -> None:
    cache = make_cache(runner, audit="off")
    driver = Driver(runner, cache)
    driver.run(prompt)
    cache.inject_fault("flip", target=target)
    _, _, expected = driver.run(prompt, use_cache=False)
    cached, hit, generated = driver.run(prompt)
    assert cached > 0
    assert generated != expected or not torch.isfinite(hit).all()


@pytest.mark.parametrize("audit", ["sampled", "full"])
def test_flipped_byte_is_reported_and_the_answer_stays_right(runner: ModelRunner, prompt: list[int], audit: str) -> None:
    cache = make_cache(runner, audit=audit)
    driver = Driver(runner, cache)
    driver.run(prompt)
    cache.inject_fault("flip")
    _, cold, _ = driver.run(prompt, use_cache=False)
    cached, hit, _ = driver.run(prompt)
    assert cached == 0
    assert cache.stats()["checksum_errors_total"] == 1
    torch.testing.assert_close(hit, cold, atol=1e-4, rtol=0)
