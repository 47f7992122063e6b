"""Recorded steps on a GPU: graphs against eager steps, no wait of the host inside a step, no allocation while decoding."""

import pytest
import torch

from engine.batch import Batch, StepKind
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.models.draft import DraftSlice
from tests.models.golden import PROMPTS, Seq, decode, prefill
from tests.models.tiny_configs import GOLDEN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


def runner(**changes):
    sizes = {"block_size": 128, "num_blocks": 40, "max_num_seqs": 6, "num_draft_tokens": 4, "max_model_len": 600}
    config = EngineConfig(model=str(GOLDEN / "tiny-a-fp8"), precision="B", device="cuda", **(sizes | changes))
    return ModelRunner(config, draft=True)


@pytest.fixture(scope="module")
def pair():
    """(eager, recorded) runners of the same model, all kernels on."""
    return runner(enforce_eager=True), runner()


def test_gpu_records_steps_when_every_op_has_a_kernel(pair):
    assert [made.path for made in pair] == ["eager", "graphs"]
    assert all(report.seconds > 0 for report in pair[1].recordings)


def test_graphs_give_the_logits_of_eager_steps(pair):
    rows = []
    for made in pair:
        seqs = [Seq(made, [*ids, *PROMPTS[3][:20]], slot) for slot, ids in enumerate(PROMPTS, start=1)]
        for seq, ids in zip(seqs, PROMPTS, strict=True):
            prefill(seq, [len(ids) - 1])
        rows.append(torch.stack([decode(seqs[: 1 + step % 4]).clone()[0] for step in range(12)]))
    # The same kernels on the same numbers; only sums that are split by batch size may differ.
    assert (rows[0] - rows[1]).pow(2).mean().sqrt() <= 0.05


def test_verify_and_draft_graphs_agree_with_eager_steps(pair):
    got = []
    for made in pair:
        seq = Seq(made, PROMPTS[2], 1)
        prefill(seq, [60])
        logits = decode([seq], 5, StepKind.VERIFY).clone()
        got.append((logits, made.draft([DraftSlice(9, 64, 1)]).logits.clone()))
    for eager, recorded in zip(*got, strict=True):
        assert (eager - recorded).pow(2).mean().sqrt() <= 0.05


def test_the_host_never_waits_inside_a_step_and_nothing_is_allocated(pair):
    recorded = pair[1]
    seqs = [Seq(recorded, PROMPTS[3], slot) for slot in (1, 2, 3)]
    for seq in seqs:
        prefill(seq, [100])
    decode(seqs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            recorded.run(Batch(StepKind.DECODE, [seq.slice(seq.done + 1) for seq in seqs]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    # Growing block tables send their changes through two small tensors; the step itself allocates nothing.
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 4
