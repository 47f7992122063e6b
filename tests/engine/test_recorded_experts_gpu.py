"""Recorded steps that hold exchanges of rows, on one GPU: a group of one rank that exchanges rows with itself, against eager steps.

What a peer adds is tested without GPUs in `tests/parallel/test_recorded_experts.py`; two GPUs run `tests/gpu/two_gpus.py`.
"""

from pathlib import Path

import pytest
import torch

from engine.batch import Batch, StepKind
from engine.config import EngineConfig
from engine.distributed import GlooGroup
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.gpu.ranks import exchanging_alone
from tests.models.golden import PROMPTS, Seq, decode, prefill
from tests.models.tiny_configs import GOLDEN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
ROUTES = ("gather", "all_to_all", "peers")


@pytest.fixture(scope="module", autouse=True)
def no_multicast():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_NVLS_ENABLE", "0")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield


def make_group(directory: Path) -> GlooGroup:
    return GlooGroup(0, 1, init_file=str(directory / "meet"), timeout_s=60)


def make_runner(group: GlooGroup, **changes) -> ModelRunner:
    sizes = {"block_size": 128, "num_blocks": 21, "max_num_seqs": 4, "num_draft_tokens": 0, "max_model_len": 600, "spec": False}
    config = EngineConfig(model=str(GOLDEN / "tiny-a-fp8"), precision="B", device="cuda", **(sizes | changes))
    with exchanging_alone():
        return ModelRunner(config, group=group)


def test_an_engine_closes_its_group_behind_its_graphs_and_starts_again(tmp_path):
    """A communicator waits for the graphs that hold it, so that the wrong order would never return. First here: a process has
    one default group, and the other tests share theirs."""
    texts = []
    for turn, eager in enumerate((False, False, True)):
        (tmp_path / str(turn)).mkdir()
        again = make_group(tmp_path / str(turn))
        runner = make_runner(again, enforce_eager=eager)
        engine = Engine(runner.config, HiCacheConfig(size_gb=0), again, runner=runner)
        for number, ids in enumerate(PROMPTS[1:3]):
            engine.add_request(Request(str(number), ids[:30], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
        text: dict[str, list[int]] = {}
        engine.step()
        while not engine.idle:
            for output in engine.step():
                text.setdefault(output.request_id, []).extend(output.token_ids)
        assert runner.path == ("eager" if eager else "graphs")
        engine.close()
        texts.append(text)
    assert texts[0] == texts[1]
    assert {name: len(ids) for name, ids in texts[2].items()} == {name: len(ids) for name, ids in texts[0].items()}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    made = make_group(tmp_path_factory.mktemp("group"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=ROUTES)
def pair(group, request):
    """(eager, recorded) runners whose experts are all here and are exchanged nevertheless."""
    runners = make_runner(group, expert_exchange=request.param, enforce_eager=True), make_runner(group, expert_exchange=request.param)
    yield runners
    for runner in runners:
        runner.close()


def test_steps_with_collectives_are_recorded(pair):
    assert [runner.path for runner in pair] == ["eager", "graphs"]


def test_replays_give_the_tokens_of_eager_steps(pair):
    """As many rows as sizes have, so that the kernels see the same shapes."""
    texts = []
    for runner in pair:
        written = []
        for count in (1, 2, 4):
            seqs = [Seq(runner, ids[:20], slot) for slot, ids in enumerate((PROMPTS * 2)[:count], start=1)]
            for seq in seqs:
                seq.ids.append(int(prefill(seq, [len(seq.ids)])[-1].argmax()))
            for _ in range(16):
                chosen = decode(seqs)[:, -1].argmax(-1).tolist()
                for seq, token in zip(seqs, chosen, strict=True):
                    seq.ids.append(token)
            written.append([seq.ids for seq in seqs])
        texts.append(written)
    assert texts[0] == texts[1]


def test_padding_changes_no_logits(pair):
    """Three rows in a step of four."""
    rows = []
    for runner in pair:
        seqs = [Seq(runner, PROMPTS[3], slot) for slot in (1, 2, 3)]
        for length, seq in zip((40, 41, 90), seqs, strict=True):
            prefill(seq, [length])
        rows.append(torch.stack([decode(seqs).clone() for _ in range(6)]))
    assert (rows[0] - rows[1]).pow(2).mean().sqrt() <= 0.05


def test_the_host_waits_for_no_device_inside_a_step(pair):
    recorded = pair[1]
    seqs = [Seq(recorded, PROMPTS[3], slot) for slot in (1, 2, 3)]
    for seq in seqs:
        prefill(seq, [100])
    decode(seqs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            recorded.run(Batch(StepKind.DECODE, [seq.slice(seq.done + 1) for seq in seqs]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_eager_and_replayed_steps_take_turns(pair):
    """One communicator serves both: prompts and steps that somebody cannot replay lie between replays."""
    eager, recorded = pair
    wanted, seq = Seq(eager, PROMPTS[2], 1), Seq(recorded, PROMPTS[2], 1)
    for turn in range(6):
        logits = [(prefill(s, [5])[-1] if turn % 2 == 0 else decode([s])[0, 0]).clone() for s in (wanted, seq)]
        assert (logits[0] - logits[1]).pow(2).mean().sqrt() <= 0.05
