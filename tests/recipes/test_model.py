"""The training model reproduces the golden vectors of a third-party implementation in fp32: what is trained is what is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.models.engram_tables import token_map
from recipes.tiny.draft import Draft
from recipes.tiny.model import FILTER, Backbone, Batch, Options
from recipes.tiny.params import stack_released, unstack_params
from recipes.tiny.pieces import head_logits
from recipes.tiny.shape import shape_from_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "model"
CHECKPOINT = GOLDEN / "tiny-a-bf16"


@pytest.fixture(scope="module")
def model() -> tuple[Backbone, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    shape = shape_from_config(json.loads((CHECKPOINT / "config.json").read_text()))
    ids = token_map(CHECKPOINT, shape.vocab, shape.engram_compressed_vocab)
    return Backbone(shape, ids, "cpu", fast=False, max_positions=1024), stack_released(shape, load_file(CHECKPOINT / "model.safetensors"))


def one_document(ids: list[int]) -> Batch:
    n = len(ids)
    zero = torch.zeros(n, dtype=torch.int64)
    return Batch(torch.tensor(ids), zero, zero + n, zero)


def prompts() -> list[list[int]]:
    return [prompt["token_ids"] for prompt in json.loads((GOLDEN / "prompts.json").read_text())]


@pytest.mark.parametrize(("rounding", "file", "tolerance"), [(False, "vectors-fp32", 1e-4), (True, "vectors-fp32-qdq", 1e-3)])
@pytest.mark.parametrize("k", range(4))
def test_logits_index_sets_and_drafts_equal_the_golden_vectors(
    model: tuple[Backbone, dict[str, torch.Tensor]], rounding: bool, file: str, tolerance: float, k: int
) -> None:
    backbone, params = model
    golden = load_file(GOLDEN / f"{file}.safetensors")
    prompt = prompts()[k]
    generated = golden[f"p{k}.gen_tokens"].tolist()
    batch = one_document(prompt + generated)
    options = Options(rounding, FILTER, torch.float32, max_len=len(prompt) + len(generated))
    with torch.no_grad():
        result = backbone.forward(params, batch, options)
        logits = head_logits(result.hidden, params["norm.weight"], params["head.weight"])
        off = (logits[golden[f"p{k}.logits_positions"].long()] - golden[f"p{k}.logits"]).abs().amax(-1)
        off = torch.cat((off, (logits[len(prompt) - 1 : -1] - golden[f"p{k}.gen_logits"]).abs().amax(-1)))
        anchors = torch.arange(len(prompt) - 1, len(prompt) + 31)
        draft = Draft(backbone)
        lo = (anchors - backbone.shape.window + 1).clamp(min=0)
        drafted = draft.forward(params, batch, result.taps, anchors, lo, options)
        tokens, draft_logits, confidence = draft.greedy(params, drafted, batch.ids[anchors + 1])
    share = float((off < tolerance).float().mean())
    assert share >= (0.9 if rounding else 1.0), off
    for layer, indexed in result.indexed.items():
        expected = golden[f"p{k}.index.{layer}"]
        found = [set(row.nonzero().flatten().tolist()) for row in indexed.sel[: len(expected)]]
        differing = sum(f != {int(x) for x in e if x >= 0} for f, e in zip(found, expected, strict=True))
        assert differing <= (2 if rounding else 0)
    wrong = int((tokens != golden[f"p{k}.draft_tokens"][:, 1:].long()).any(1).sum())
    assert wrong <= (2 if rounding else 0)
    if not rounding:
        assert (draft_logits[:3] - golden[f"p{k}.draft_logits_first3"]).abs().max() < 1e-3
        assert (confidence - golden[f"p{k}.draft_confidence"]).abs().max() < 1e-3


def test_packed_documents_equal_single_ones(model: tuple[Backbone, dict[str, torch.Tensor]]) -> None:
    backbone, params = model
    documents = [prompts()[2][:96], prompts()[3][:160], prompts()[2][10:26]]
    options = Options(False, FILTER, torch.float32, max_len=160)
    starts = [0, 96, 256]
    start = torch.cat([torch.full((len(d),), at) for d, at in zip(documents, starts, strict=True)])
    end = torch.cat([torch.full((len(d),), at + len(d)) for d, at in zip(documents, starts, strict=True)])
    packed = Batch(torch.tensor([i for d in documents for i in d]), start, end, start)
    with torch.no_grad():
        together = backbone.forward(params, packed, options).hidden
        alone = torch.cat([backbone.forward(params, one_document(d), options).hidden for d in documents])
    assert (together - alone).abs().max() < 1e-4


def test_stacking_experts_is_undone(model: tuple[Backbone, dict[str, torch.Tensor]]) -> None:
    backbone, params = model
    released = load_file(CHECKPOINT / "model.safetensors")
    back = unstack_params(backbone.shape, params)
    assert set(back) == set(released)
    assert all(torch.equal(back[name], t.float()) for name, t in released.items() if not name.endswith("bias_vl"))
