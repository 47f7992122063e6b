"""The whole recipe at miniature size on a CPU: phases run, the loss falls, weights come back, the draft stages train."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.tiny import quant
from recipes.tiny.checkpoint import load_parts, save_parts
from recipes.tiny.corpus import draw_sample
from recipes.tiny.model import DENSE, FILTER, TOPK
from recipes.tiny.optim import orthogonalise
from recipes.tiny.packing import pack
from recipes.tiny.params import initial_params
from recipes.tiny.setup import miniature_setup
from recipes.tiny.train import Trainer

ROOT = Path(__file__).resolve().parents[2]


def small_trainer(rows: int = 256) -> Trainer:
    setup = miniature_setup(rows)
    return Trainer(setup.backbone, initial_params(setup.shape, 0), rows, torch.float32)


def test_one_batch_is_learned_by_heart_in_every_selection_mode() -> None:
    trainer = small_trainer()
    packed = pack([draw_sample(f"batch/{i}", "short", 40, 80) for i in range(2)], 256, 0.0, random.Random(0))
    losses = []
    for step in range(24):
        mode = (DENSE, TOPK, FILTER)[step // 8]
        trainer.options = replace(trainer.options, rounding=step > 3, selection=mode, max_len=256)
        answer_loss, _, answers = trainer.step(packed, 1.0, True)[:3].tolist()
        losses.append(answer_loss / answers)
    assert losses[0] > 6
    assert losses[-1] < losses[0] / 4


def test_every_backbone_parameter_gets_a_gradient() -> None:
    trainer = small_trainer()
    trainer.options = replace(trainer.options, selection=FILTER, max_len=256)
    packed = pack([draw_sample("gradient", "short", 60, 120)], 256, 0.0, random.Random(0))
    batch, targets = trainer.device_batch(packed)
    result = trainer.b.forward(trainer.params, batch, trainer.options)
    loss = trainer.losses(result, targets)[0].mean() + trainer.index_loss(result, batch, torch.from_numpy(packed.kl_rows).long())
    loss.backward()
    missing = [n for n, p in trainer.params.items() if p.grad is None and not n.startswith("mtp.") and not n.endswith("gate.bias")]
    assert missing == []


def test_weights_survive_the_way_home(tmp_path: Path) -> None:
    params = initial_params(miniature_setup().shape, 1)
    save_parts(tmp_path, params)
    back = load_parts(tmp_path)
    assert set(back) == set(params)
    for name, p in params.items():
        assert torch.allclose(back[name], p, rtol=2**-8, atol=0)


def test_muon_updates_are_nearly_orthogonal() -> None:
    g = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalise(g))
    assert singular.min() > 0.4
    assert singular.max() < 1.4


@pytest.mark.parametrize("name", ["q8", "q4_index", "q4_kv"])
def test_fake_quantisers_equal_the_engines_and_pass_gradients(name: str) -> None:
    import importlib

    reference = getattr(importlib.import_module(f"engine.ops.{name}"), name)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 64)[:, None]
    leaf = x.clone().requires_grad_()
    y = getattr(quant, name)(leaf)
    y.sum().backward()
    assert torch.equal(y.detach(), reference(x).float())
    assert torch.equal(leaf.grad, torch.ones_like(x))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recipe_runs_at_miniature_size(tmp_path: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    train = [
        "recipes.tiny.train",
        "p1=30",
        "p3=10",
        "--miniature",
        "--workers",
        "1",
        "--out",
        str(tmp_path),
        "--score-counts",
        "1,1",
    ]
    for command in (
        train,
        ["recipes.tiny.train_draft", "6", "--miniature", "--workers", "1", "--resume", str(tmp_path), "--out", str(tmp_path)],
    ):
        run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
        assert run.returncode == 0, run.stderr[-2000:]
    curves = [r for r in json.loads((tmp_path / "curves.json").read_text()) if "loss" in r]
    assert curves[-1]["loss"] < curves[0]["loss"]
    assert "calibration_error" in json.loads((tmp_path / "draft_curves.json").read_text())[-1]
