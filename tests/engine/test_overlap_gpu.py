"""Overlapped decode steps on a GPU: no wait for the device while a step is started, and the tokens of separate steps."""

import random

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.models.golden import PROMPTS
from tests.models.tiny_configs import GOLDEN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


def make_engine(overlap: bool) -> Engine:
    # Formats and profile whose steps are recorded: eager ones copy their inputs from memory that is not pinned, which waits.
    config = EngineConfig(
        model=str(GOLDEN / "tiny-a-fp8"),
        precision="B",
        device="cuda",
        block_size=128,
        num_blocks=40,
        max_num_seqs=6,
        max_model_len=600,
        spec=False,
        zero_overhead_scheduling=overlap,
    )
    return Engine(config, HiCacheConfig(size_gb=0))


def requests() -> list[Request]:
    rng = random.Random(3)
    kinds = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "seed": 6}, {"temperature": 0.0}]
    return [
        Request(f"{i}", ids, SamplingParams(max_tokens=rng.randint(30, 60), ignore_eos=True, **kind))
        for i, (ids, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]


def test_tokens_are_those_of_separate_steps():
    texts = []
    for overlap in (False, True):
        engine = make_engine(overlap)
        for request in requests():
            engine.add_request(request)
        out: dict[str, list[int]] = {}
        engine.step()
        while not engine.idle:
            for output in engine.step():
                out.setdefault(output.request_id, []).extend(output.token_ids)
        engine.close()
        texts.append(out)
    assert texts[0] == texts[1]


def test_starting_a_step_never_waits_for_the_device():
    """Only reading tokens waits, by an event. torch makes every other wait an error meanwhile; an inserted one shows that it does."""
    engine = make_engine(True)
    assert engine.runner.path == "graphs"
    for request in requests():
        engine.add_request(request)
    while engine.scheduler.waiting or len(engine.scheduler.running) < len(PROMPTS):
        engine.step()
    for _ in range(6):
        engine.step()
    run = engine.runner.run
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            assert engine.step()
        engine.runner.run = lambda batch: (run(batch), run(batch)[0, 0].item())[0]
        with pytest.raises(RuntimeError, match="synchroniz"):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()
