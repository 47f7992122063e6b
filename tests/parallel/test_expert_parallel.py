"""Engines that share experts give what engines with all experts give: compiled bit for bit, eager token for token."""

import random

import pytest
import torch

from engine.batch import Batch, StepKind
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.models import tiny
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.engine.simulation import run_ranks
from tests.models.golden import GOLDEN, PROMPTS, Seq
from tests.parallel.peer_threads import peers_are_threads

BASE = {
    "device": "cpu",
    "precision": "F",
    "num_threads": 1,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_model_len": 384,
    "num_blocks": 80,
    "max_num_batched_tokens": 48,
    "prefill_any_interval": 2,
}


def golden_config(**changes) -> EngineConfig:
    return EngineConfig(**{"model": str(GOLDEN / "tiny-a-bf16"), **BASE, **changes})


def mixed_requests(count: int, vocab_size: int, longest: int, seed: int = 0) -> list[Request]:
    """Greedy requests of mixed prompt and output lengths."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        prompt = [rng.randrange(20, vocab_size) for _ in range(rng.randint(1, longest))]
        requests.append(Request(f"{number}", prompt, SamplingParams(temperature=0, max_tokens=rng.randint(1, 10), ignore_eos=True)))
    return requests


def serve(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    """All tokens of this rank's requests, which arrive a few at a time; returns when the group is idle."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    pending = list(requests)
    while True:
        for request in pending[:2]:
            engine.add_request(request)
        del pending[:2]
        for output in engine.step():
            assert not output.error
            tokens[output.request_id] += output.token_ids
        if engine.idle and not pending:
            return tokens


def run_group(dp: int, requests: list[Request], config: EngineConfig) -> dict[str, list[int]]:
    def rank_main(group):
        torch.set_num_threads(1)
        mine = requests if group.size == 1 else [r for i, r in enumerate(requests) if i % group.size == group.rank]
        return serve(Engine(config, HiCacheConfig(size_gb=0), group), mine)

    merged: dict[str, list[int]] = {}
    for tokens in run_ranks(dp, rank_main):
        merged |= tokens
    return merged


@pytest.fixture(scope="module", autouse=True)
def any_route():
    with peers_are_threads():
        yield


@pytest.fixture(scope="module")
def requests():
    return mixed_requests(10, 500, 70)


@pytest.fixture(scope="module")
def expected(requests):
    return run_group(1, requests, golden_config())


@pytest.mark.parametrize(("dp", "ep", "route"), [(2, 2, "gather"), (2, 2, "all_to_all"), (4, 2, "peers"), (4, 4, "auto")])
def test_shared_experts_give_the_tokens_of_one_rank(requests, expected, dp, ep, route):
    config = golden_config(dp=dp, ep=ep, expert_exchange=route, yoco_mode="compact", yoco_keep_tokens=28)
    plain = run_group(1, requests, golden_config(yoco_mode="compact", yoco_keep_tokens=28))
    assert run_group(dp, requests, config) == plain


def test_the_eager_path_gives_the_same_tokens(requests, expected):
    config = golden_config(dp=2, ep=2, enforce_eager=True, spec=False)
    assert run_group(2, requests[:4], config) == {name: expected[name] for name in list(expected)[:4]}


def step_logits(dp: int, ep: int, precision: str, exchange: str = "auto") -> list[list[torch.Tensor]]:
    """Per rank the logits of a prompt step and of decode steps; the second rank has no prompt, so it joins without rows."""

    def rank_main(group):
        torch.set_num_threads(1)
        config = golden_config(dp=dp, ep=ep, precision=precision, expert_exchange=exchange, batch_invariant=True)
        runner = ModelRunner(config, group=group)
        runner.native.wait()
        assert runner.path == "compiled", runner.native.status
        seqs = [] if group.rank == 1 else [Seq(runner, ids[:20], slot) for slot, ids in enumerate(PROMPTS[1:], start=1)]
        kept = []
        for kind, rows in ((StepKind.PREFILL, 15), (StepKind.DECODE, 1), (StepKind.VERIFY, 3)):
            if seqs:
                kept.append(runner.run(Batch(kind, [s.slice(s.done + rows) for s in seqs])))
            elif ep > 1:
                runner.join(kind)
        return kept

    return run_ranks(dp, rank_main)


@pytest.mark.parametrize("precision", ["F", "Fq"])
@pytest.mark.parametrize("exchange", ["gather", "all_to_all", "peers"])
def test_compiled_logits_are_equal_bit_for_bit(precision, exchange):
    shared, alone = step_logits(2, 2, precision, exchange), step_logits(2, 1, precision)
    assert len(shared[0]) == 3
    assert all(torch.equal(a, b) for a, b in zip(shared[0], alone[0], strict=True))
    assert shared[1] == []


def test_a_rank_reads_only_its_experts():
    def rank_main(group):
        runner = ModelRunner(golden_config(dp=2, ep=2, enforce_eager=True), group=group)
        return [layer.block.ffn.w13.shape[0] for layer in runner.backbone.layers]

    assert run_ranks(2, rank_main) == [[5] * 8, [5] * 8]  # four routed ones and the shared one


def test_ranks_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"engine.ep is 2 and engine.dp is 3"):
        golden_config(dp=3, ep=2)


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
def test_two_hundred_mixed_requests_of_the_embedded_model(dp, ep, tmp_path):
    requests = mixed_requests(200, 4000, 200, seed=dp * ep)
    model = {"model": str(tiny.ensure_tiny(tmp_path)), "block_size": 128, "num_blocks": 60, "max_num_batched_tokens": 256}
    expected = run_group(1, requests, golden_config(**model))
    assert run_group(dp, requests, golden_config(dp=dp, ep=ep, **model)) == expected
