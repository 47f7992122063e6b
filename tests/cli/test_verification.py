"""`dix model verify` on the terminal: what a pass of several prompts is told as."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deepinfer_cli import verification
from deepinfer_cli.ui import Ui, UiOptions
from deepinfer_cli.verification import show, worst
from engine.verify import PromptResult, RunResult, VerifyMode, VerifyReport


def prompt(name: str, **changes: Any) -> PromptResult:
    fine: dict[str, Any] = {
        "num_positions": 10, "max_error": 1e-6, "rms": 0.0, "share_close": 1.0, "mean_kl": 1e-9, "top1": 1.0, "greedy_agree": 4,
        "greedy_steps": 4, "problems": [],
    }  # fmt: skip
    return PromptResult(prompt_id=name, **fine | changes)


def shown(*prompts: PromptResult, **options: Any) -> list[str]:
    run = RunResult(VerifyMode.FP32, "checkpoint", 16, True, list(prompts), 1.0, [])
    out = io.StringIO()
    call = SimpleNamespace(json=False, ui=Ui(UiOptions(**options), {}, out, io.StringIO()))
    show(cast(Any, call), VerifyReport("golden", 16, [run]))
    return out.getvalue().splitlines()


def test_a_pass_is_one_row_with_the_worst_of_its_prompts() -> None:
    head, row, verdict = shown(prompt("a"), prompt("b", max_error=2e-4, share_close=0.9, mean_kl=3e-5, greedy_agree=3))
    assert head.split()[:4] == ["MODE", "STEPS", "PROMPTS", "POSITIONS"]
    assert row.split() == ["fp32", "chunks", "of", "16,", "together", "2", "20", "2.0e-04", "90.0%", "3.0e-05", "100.0%", "7/8", "ok"]
    assert verdict == "all inside the tolerances: 1 of 1 passes · blocks of 16"


def test_a_prompt_outside_fails_its_pass_and_is_named() -> None:
    _, row, problem, verdict = shown(prompt("a"), prompt("b", max_error=math.nan, problems=["largest logit error nan > 0.001"]))
    assert (row.split()[7], row.split()[-1]) == ("nan", "fail")
    assert problem == "fp32, chunks of 16, together: b: largest logit error nan > 0.001"
    assert verdict.startswith("outside the tolerances: 0 of 1")


def test_every_prompt_has_its_row_when_more_is_asked_for() -> None:
    rows = shown(prompt("a"), prompt("b", problems=["x"]), verbose=1)[1:3]
    assert [(row.split()[5], row.split()[-1]) for row in rows] == [("a", "ok"), ("b", "fail")]


def test_what_is_no_number_is_the_worst() -> None:
    assert math.isnan(worst([1.0, math.nan, 2.0]))
    assert worst([1.0, 2.0]) == 2.0


@pytest.mark.parametrize("built", [True, False])
def test_whoever_waits_for_the_compiler_is_told(built: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a busy machine the build took three minutes, in which nothing was said."""
    err = io.StringIO()
    monkeypatch.setattr(verification, "is_built", lambda folder: built)
    monkeypatch.setattr(verification, "verify_dir", lambda *_, **__: None)
    call = SimpleNamespace(json=False, ui=Ui(UiOptions(), {}, io.StringIO(), err))
    verification.verify(cast(Any, call), tmp_path, "fp32", [64], 16)
    assert ("is built first" in err.getvalue()) == (not built and not torch.cuda.is_available())
