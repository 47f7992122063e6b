"""Runs the comparison with reference vectors and shows agreement per prompt."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from deepinfer_cli.invocation import Invocation
from deepinfer_cli.ui import Column
from engine.verify import PromptResult, RunResult, VerifyMode, VerifyReport, verify_dir

CHUNKS = (16, 64, 0)


def verify(call: Invocation, directory: Path, mode: str | None, chunks: list[int], block_size: int) -> VerifyReport:
    """Every mode whose vectors exist, or the one named; every chunk size, prompts alone and together."""
    modes = [VerifyMode(mode)] if mode else None
    sizes = tuple(chunks) or CHUNKS
    count = (len(modes) if modes else sum((directory / f"vectors-{m}.safetensors").exists() for m in VerifyMode)) * len(sizes) * 2
    done = 0
    with call.ui.progress("verify", max(count, 1)) as bar:

        def advance(run: RunResult) -> None:
            nonlocal done
            done += 1
            bar.update(done, f"{run.mode} · {describe(run)}")

        return verify_dir(directory, modes, sizes, block_size=block_size, on_run=advance)


def describe(run: RunResult) -> str:
    chunk = f"chunks of {run.chunk_size}" if run.chunk_size else "whole prompts"
    return f"{chunk}, {'together' if run.together else 'one by one'}"


def show(call: Invocation, report: VerifyReport) -> None:
    if call.json:
        call.ui.document("dix.verify/1", document(report))
        return
    columns = [Column("MODE", right=False), Column("STEPS", right=False), Column("PROMPT", right=False, role="accent")]
    columns += [Column(head) for head in ("POSITIONS", "LARGEST ERROR", "WITHIN 1e-3", "MEAN KL", "TOP-1", "GREEDY")] + [
        Column("", right=False)
    ]
    call.ui.table(columns, [_cells(run, prompt) for run in report.runs for prompt in run.prompts])
    for run in report.runs:
        for problem in [*run.problems, *(f"{p.prompt_id}: {text}" for p in run.prompts for text in p.problems)]:
            call.ui.print(f"{run.mode}, {describe(run)}: {problem}", "bad")
    passed = sum(run.passed for run in report.runs)
    verdict = "all inside the tolerances" if report.passed else "outside the tolerances"
    call.ui.print(f"{verdict}: {passed} of {len(report.runs)} passes · blocks of {report.block_size}", "good" if report.passed else "bad")


def _cells(run: RunResult, prompt: PromptResult) -> tuple[Any, ...]:
    return (
        run.mode, describe(run), prompt.prompt_id, prompt.num_positions, f"{prompt.max_error:.1e}", f"{prompt.share_close:.1%}",
        f"{prompt.mean_kl:.1e}", f"{prompt.top1:.1%}", f"{prompt.greedy_agree}/{prompt.greedy_steps}", "ok" if prompt.passed else "fail",
    )  # fmt: skip


def document(report: VerifyReport) -> dict[str, Any]:
    """The report for JSON: values that are not numbers become null."""
    runs = []
    for run in report.runs:
        prompts = [{**_finite(dataclasses.asdict(p)), "passed": p.passed} for p in run.prompts]
        facts = {"mode": str(run.mode), "checkpoint": run.checkpoint, "chunk_size": run.chunk_size, "together": run.together}
        runs.append({**facts, "passed": run.passed, "problems": run.problems, "prompts": prompts})
    return {"path": report.path, "block_size": report.block_size, "passed": report.passed, "runs": runs}


def _finite(body: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in body.items()}
