"""The training model and the serving model agree on the embedded configuration: logits in off and mask mode, and drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Batch as StepBatch
from engine.batch import LogitRows, SequenceSlice, StepKind
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.models.draft import DraftSlice
from recipes.tiny.corpus import draw_sample
from recipes.tiny.draft import Draft
from recipes.tiny.export import export, served_params
from recipes.tiny.model import FILTER, Batch, Options
from recipes.tiny.params import initial_params
from recipes.tiny.pieces import head_logits
from recipes.tiny.setup import full_setup

KEEP = 140


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("checkpoint")
    export(initial_params(full_setup("cpu", fast=False).shape, 3), out)
    return out


@pytest.mark.parametrize("mode", ["off", "mask"])
def test_logits_and_drafts_agree(checkpoint: Path, mode: str) -> None:
    ids = draw_sample("agreement", "short", 380, 400).ids.astype("int64").tolist()
    ids = ids[: len(ids) // 2 * 2]
    n, keep = len(ids), KEEP if mode == "mask" else 0
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        precision="F",
        num_threads=1,
        max_num_batched_tokens=1024,
        max_model_len=1024,
        yoco_mode=mode,
        yoco_keep_tokens=keep,
    )
    runner = ModelRunner(config, draft=True)
    piece = SequenceSlice(ids, 0, n, list(range(1, -(-n // 128) + 2)), 1, logit_rows=LogitRows.ALL)
    served = runner.run(StepBatch(StepKind.PREFILL, [piece]))
    next_id = int(served[-1].argmax())
    proposed = runner.draft([DraftSlice(next_id, n - 1, 1)])

    backbone = full_setup("cpu", fast=False).backbone
    params = served_params(checkpoint)
    zero = torch.zeros(n + 2, dtype=torch.int64)
    rect = n - keep if keep else 0
    batch = Batch(torch.tensor([*ids, next_id, 2]), zero, zero + n + 2, zero + rect)
    with torch.no_grad():
        result = backbone.forward(params, batch, Options(False, FILTER, torch.float32, n + 2))
        trained = head_logits(result.hidden, params["norm.weight"], params["head.weight"])[:n]
        anchors = torch.tensor([n - 1])
        draft = Draft(backbone)
        lo = (anchors - backbone.shape.window + 1).clamp(min=rect)
        drafted = draft.forward(params, batch, result.taps, anchors, lo, Options(False, FILTER, torch.float32))
        tokens, _, confidence = draft.greedy(params, drafted, torch.tensor([next_id]))
    assert (served - trained)[rect:].abs().max() < 1e-4
    assert torch.equal(tokens, proposed.token_ids)
    assert (confidence - proposed.confidence).abs().max() < 1e-4
