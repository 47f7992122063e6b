"""Packed weights give what decoded ones give: every layer type, both profiles, few and many rows."""

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.models import packed_layers
from engine.models.draft import DraftSlice
from engine.models.packed_layers import PackedLinear, PackedMoE
from tests.models.golden import PROMPTS, Seq, decode, prefill
from tests.models.tiny_configs import GOLDEN

QUANTIZED = str(GOLDEN / "tiny-a-fp8")


def runner(weights, precision="B", model=QUANTIZED, **changes):
    sizes = {"block_size": 16, "num_blocks": 100, "max_num_seqs": 4, "num_draft_tokens": 4}
    config = EngineConfig(model=model, precision=precision, weights=weights, enforce_eager=True, device="cpu", **sizes, **changes)
    return ModelRunner(config, draft=True)


@pytest.mark.parametrize("precision", ["B", "R"])
@pytest.mark.parametrize("few", [0, 64])
def test_packed_weights_give_the_logits_and_drafts_of_decoded_ones(precision, few, monkeypatch):
    monkeypatch.setattr(packed_layers, "FEW_ROWS", few)
    results = []
    for weights in ("dense", "packed"):
        made = runner(weights, precision)
        seq = Seq(made, PROMPTS[2], 1)
        logits = [prefill(seq, [40, 50]), *(decode([seq])[0] for _ in range(4))]
        results.append((torch.cat(logits), made.draft([DraftSlice(9, 93, 1)]).logits))
    for dense, packed in zip(*results, strict=True):
        # bf16 sums in another order: the same noise as between two devices, small against logits of unit size.
        assert (dense - packed).pow(2).mean().sqrt() <= 0.1


def test_no_decoded_copy_of_the_experts_is_kept():
    backbone = runner("packed").backbone
    for layer in backbone.layers:
        assert isinstance(layer.block.ffn, PackedMoE)
        assert isinstance(layer.block.attention.wq_b, PackedLinear)
        assert not hasattr(layer.block.ffn, "w13")


NOT_PACKED = [({"precision": "F"}, "computes in fp32"), ({"model": str(GOLDEN / "tiny-a-bf16")}, "not quantised")]


@pytest.mark.parametrize(("changes", "reason"), NOT_PACKED)
def test_packed_weights_are_refused_where_they_cannot_be(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        runner("packed", **changes)
    assert not isinstance(runner("auto", **changes).backbone.layers[0].block.ffn, PackedMoE)
