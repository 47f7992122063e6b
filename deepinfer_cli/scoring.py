"""`dix model eval`: the embedded model's held-out scores, through the engine that serves it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_cli.invocation import Invocation
from deepinfer_cli.ui import Column

if TYPE_CHECKING:
    from engine.evaluate import Evaluation, Score


def score(call: Invocation, directory: Path) -> Evaluation:
    """Ask every shipped prompt. Raises: CheckpointError and others of the engine."""
    from engine.evaluate import evaluate, load_prompts
    from engine.llm import LLM

    prompts, texts = load_prompts()
    engine = {f.name: getattr(call.settings.engine, f.name) for f in dataclasses.fields(call.settings.engine) if f.name != "model"}
    with call.ui.progress("loading", 1.0) as bar, LLM(str(directory), **engine) as llm:
        return evaluate(llm, prompts, texts, lambda name, p: bar.update(p.finished / max(1, p.total), name))


def show(call: Invocation, name: str, evaluation: Evaluation) -> None:
    """One table of scores with their floors, controls and drafts below it; or the JSON document."""
    if call.json:
        call.ui.document("dix.eval/1", {"model": name, **evaluation.document()})
        return
    columns = [Column("Family", right=False), Column("Right"), Column("Of"), Column("Share"), Column("Floor"), Column("", right=False)]
    rows = [_row(family, result) for family, result in evaluation.scores.items()]
    rows += [_row(f"{family}, context shuffled", result) for family, result in evaluation.control.items()]
    call.ui.table(columns, rows)
    if evaluation.accepted:
        kept = ", ".join(f"{family} {mean:.2f}" for family, mean in evaluation.accepted.items())
        call.ui.print(f"drafts kept per verification: {kept}")
    if evaluation.perplexity is not None:
        call.ui.print(f"perplexity of plain text: {evaluation.perplexity:.1f} per token")


def _row(family: str, result: Score) -> tuple[str, ...]:
    floor = "" if result.floor is None else f"{result.floor:.0%}"
    verdict = "" if result.floor is None else ("ok" if result.passed else "below")
    return family, f"{result.right:,}", f"{result.count:,}", f"{result.share:.1%}", floor, verdict
