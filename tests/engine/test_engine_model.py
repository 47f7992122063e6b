"""The engine with the real model: third-party greedy continuations through paged cache, chunks, batches, preemption and ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from engine.engine import Engine
from engine.llm import LLM
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.engine.simulation import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden" / "model"
CHECKPOINT = GOLDEN / "tiny-a-bf16"
SETTINGS = {
    "device": "cpu",
    "precision": "F",
    "num_threads": 1,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_model_len": 384,
    "num_blocks": 80,
    "max_num_batched_tokens": 64,
}
NEW = 8


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt["token_ids"] for prompt in json.loads((GOLDEN / "prompts.json").read_text())]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    vectors = load_file(GOLDEN / "vectors-fp32.safetensors")
    return [vectors[f"p{i}.gen_tokens"].tolist() for i in range(4)]


def make_engine(group=None, hicache: HiCacheConfig | None = None, **changes) -> Engine:
    config = EngineConfig(**{"model": str(CHECKPOINT), **SETTINGS, **changes})
    return Engine(config, hicache or HiCacheConfig(size_gb=0), group)


def generate(engine: Engine, prompts: list[list[int]], count: int = NEW, **params) -> list[list[int]]:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **params})
    for i, ids in enumerate(prompts):
        engine.add_request(Request(f"{i}", ids, sampling))
    tokens: dict[str, list[int]] = {f"{i}": [] for i in range(len(prompts))}
    while True:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        if engine.idle:
            return list(tokens.values())


@pytest.mark.parametrize("budget", [16, 64, 400])
def test_greedy_continuations_equal_the_golden_ones_for_any_chunk_size(prompts, expected, budget):
    engine = make_engine(max_num_batched_tokens=budget)
    assert generate(engine, prompts) == [tokens[:NEW] for tokens in expected]


def test_a_request_alone_equals_the_request_in_a_batch(prompts, expected):
    engine = make_engine()
    for ids, tokens in zip(prompts, expected, strict=True):
        assert generate(engine, [ids]) == [tokens[:NEW]]


def test_preemption_does_not_change_tokens(prompts, expected):
    # Every draft is verified: lengths by measured cost would let the sequences grow differently in every run.
    engine = make_engine(num_blocks=24, max_model_len=192, max_num_seqs=3, prefill_any_interval=1, enable_mtp_varlen=False)
    short = [prompts[1], prompts[2], prompts[2], prompts[1], prompts[2]]
    wanted = [expected[1], expected[2], expected[2], expected[1], expected[2]]
    assert generate(engine, short, 32) == wanted
    assert engine.stats()["preemptions_total"] > 0


def test_two_ranks_give_the_tokens_of_one(prompts, expected):
    def rank_main(group):
        torch.set_num_threads(1)
        return generate(make_engine(group, prefill_any_interval=2), prompts[group.rank :: 2])

    even, odd = run_ranks(2, rank_main)
    assert [even[0], odd[0], even[1], odd[1]] == [tokens[:NEW] for tokens in expected]


def test_sampling_with_a_seed_does_not_depend_on_the_batch(prompts):
    params = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
    engine = make_engine()
    together = generate(engine, prompts, **params)
    assert together == [generate(engine, [ids], **params)[0] for ids in prompts]


def test_offline_generation_reads_the_checkpoint_directory(prompts, expected):
    with LLM(str(CHECKPOINT), **SETTINGS) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, top_logprobs=3)
        results = llm.generate(params=greedy, prompt_token_ids=prompts)
        assert [result.token_ids for result in results] == [tokens[:NEW] for tokens in expected]
        assert all(result.text == llm.tokenizer.decode(result.token_ids) for result in results)
        assert all(entry.top[0][0] == token for r in results for entry, token in zip(r.logprobs, r.token_ids, strict=True))


def test_a_restored_prompt_gives_the_tokens_of_a_computed_one(prompts):
    hicache = HiCacheConfig(size_gb=0.02, min_restore_tokens=16, audit="full")
    engine = make_engine(hicache=hicache, yoco_mode="compact", yoco_keep_tokens=28)
    cold = generate(engine, [prompts[3]])
    warm = generate(engine, [prompts[3]])
    assert warm == cold
    assert engine.stats()["tokens"]["cached_total"] == (len(prompts[3]) - 28) // 16 * 16


RANK = """
import json, sys
from engine.process_env import prepare_process
prepare_process(1, 2)
from engine.distributed import GlooGroup
from tests.engine.test_engine_model import generate, make_engine
rank, where, prompts = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
engine = make_engine(GlooGroup(rank, 2, init_file=where, timeout_s=30), prefill_any_interval=2, dp=2)
tokens = generate(engine, prompts)
print(json.dumps([tokens, engine.stats()["steps_total"]]))
engine.close()
"""


def test_two_processes_in_lockstep_give_the_tokens_of_one(prompts, expected, tmp_path):
    shares = [prompts[1:], []]  # the second rank has nothing to do but to keep step
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet"), json.dumps(share)],
            stdout=subprocess.PIPE,
            cwd=GOLDEN.parents[2],
        )
        for rank, share in enumerate(shares)
    ]
    try:
        (tokens, steps), (nothing, other_steps) = (json.loads(process.communicate(timeout=90)[0]) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert tokens == [want[:NEW] for want in expected[1:]]
    assert nothing == []
    assert steps == other_steps
