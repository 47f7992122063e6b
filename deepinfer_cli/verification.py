"""Runs the comparison with reference vectors and shows agreement per prompt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from csrc.loader import BuildError
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.ui import Column
from engine.native_library import default_build_dir, is_built
from engine.verify import PromptResult, RunResult, VerifyMode, VerifyReport, verify_dir

CHUNKS = (16, 64, 0)
MEASURES = ("LARGEST ERROR", "WITHIN 1e-3", "MEAN KL", "TOP-1", "GREEDY")


def verify(call: Invocation, directory: Path, mode: str | None, chunks: list[int], block_size: int) -> VerifyReport:
    """Every mode whose vectors exist, or the one named; every chunk size, prompts alone and together."""
    modes = [VerifyMode(mode)] if mode else None
    sizes = tuple(chunks) or CHUNKS
    count = (len(modes) if modes else sum((directory / f"vectors-{m}.safetensors").exists() for m in VerifyMode)) * len(sizes) * 2
    done = 0
    if first_build():
        call.ui.note("the compiled CPU step is built first: a minute, on a busy machine several", "quiet")
    with call.ui.progress("verify", max(count, 1)) as bar:

        def advance(run: RunResult) -> None:
            nonlocal done
            done += 1
            bar.update(done, f"{run.mode} · {describe(run)}")

        return verify_dir(directory, modes, sizes, block_size=block_size, on_run=advance)


def first_build() -> bool:
    """Whether the passes wait for a compiler: exact comparisons need the compiled step's order of sums."""
    import torch

    try:
        return not torch.cuda.is_available() and not is_built(default_build_dir())
    except BuildError:
        return False  # there is no compiler: they run eagerly


def describe(run: RunResult) -> str:
    chunk = f"chunks of {run.chunk_size}" if run.chunk_size else "whole prompts"
    return f"{chunk}, {'together' if run.together else 'one by one'}"


def show(call: Invocation, report: VerifyReport) -> None:
    if call.json:
        call.ui.document("dix.verify/1", document(report))
        return
    call.ui.table(*(every_prompt(report) if call.ui.options.verbose else every_pass(report)))
    for run in report.runs:
        for problem in [*run.problems, *(f"{p.prompt_id}: {text}" for p in run.prompts for text in p.problems)]:
            call.ui.print(f"{run.mode}, {describe(run)}: {problem}", "bad")
    passed = sum(run.passed for run in report.runs)
    verdict = "all inside the tolerances" if report.passed else "outside the tolerances"
    call.ui.print(f"{verdict}: {passed} of {len(report.runs)} passes · blocks of {report.block_size}", "good" if report.passed else "bad")


def every_pass(report: VerifyReport) -> tuple[list[Column], list[tuple[Any, ...]]]:
    """One row a pass: the worst of its prompts, and sums where prompts add up."""
    columns = [Column("MODE", right=False, role="accent"), Column("STEPS", right=False)]
    columns += [Column(head) for head in ("PROMPTS", "POSITIONS", *MEASURES)] + [Column("", right=False)]
    return columns, [_pass_cells(run) for run in report.runs]


def _pass_cells(run: RunResult) -> tuple[Any, ...]:
    prompts = run.prompts
    agree, steps = (sum(getattr(p, name) for p in prompts) for name in ("greedy_agree", "greedy_steps"))
    return (
        run.mode, describe(run), len(prompts), sum(p.num_positions for p in prompts), f"{worst(p.max_error for p in prompts):.1e}",
        f"{-worst(-p.share_close for p in prompts):.1%}", f"{worst(p.mean_kl for p in prompts):.1e}", f"{run.top1:.1%}", f"{agree}/{steps}",
        "ok" if run.passed else "fail",
    )  # fmt: skip


def worst(values: Iterable[float]) -> float:
    """The largest value; one that is no number is worse than any."""
    return max(values, key=lambda value: (math.isnan(value), value))


def every_prompt(report: VerifyReport) -> tuple[list[Column], list[tuple[Any, ...]]]:
    columns = [Column("MODE", right=False), Column("STEPS", right=False), Column("PROMPT", right=False, role="accent")]
    columns += [Column(head) for head in ("POSITIONS", *MEASURES)] + [Column("", right=False)]
    return columns, [_prompt_cells(run, prompt) for run in report.runs for prompt in run.prompts]


def _prompt_cells(run: RunResult, prompt: PromptResult) -> tuple[Any, ...]:
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
