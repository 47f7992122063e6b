"""`dix tune draft-confidence`: temperatures that make the drafter's confidences true, from the engine in this process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_cli.commands.serve import SERVER_DEFAULTS
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.models import is_tiny, open_engine
from deepinfer_cli.options import command
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from engine.spec_stats import DraftReport

KEY = "dflash_confidence_head_temperature"


def _draft_confidence(
    call: Invocation,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="tiny, a directory, or a hub id.  [default: tiny]")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="One prompt per line, as the model should read it.")
    ] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="At most so many prompts.")] = 128,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Tokens behind each prompt.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", metavar="X", min=0, help="Of the generated text.")] = 0.0,
    write: Annotated[bool, typer.Option("--write", help="Put the fitted temperatures into dix.toml.")] = False,
) -> int:
    """Compare how sure the drafter was with what was kept, and fit one temperature per drafted place.

      dix tune draft-confidence
      dix tune draft-confidence ./model --prompts prompts.txt --write

    Every draft is verified, so nothing is left out of the count. Without --prompts the embedded model is asked its held-out
    prompts. Confidences choose how many drafts a step verifies; they never change what is generated.
    """
    from deepinfer_cli.models import resolve_model

    directory, name = resolve_model(call, model)
    if prompts is None and not is_tiny(name):
        raise ConfigError("there are no prompts for this model", hint="--prompts FILE with one prompt per line, like those it will serve")
    report = measure(call, directory, read_prompts(prompts, count), max_tokens, temperature)
    written = keep(call, name, report) if write else None
    show(call, name, report, written)
    return ExitCode.OK


def read_prompts(path: Path | None, count: int) -> list[str]:
    """Texts of a file, or the embedded model's held-out prompts. Raises: ConfigError for an empty or unreadable file."""
    if path is None:
        from engine.eval_prompts import load_prompts

        found = load_prompts()[0]
        step = max(1, len(found) // count)
        return [prompt.render() for prompt in found[::step][:count]]
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="a text file with one prompt per line") from None
    if not lines:
        raise ConfigError(f"{path} has no prompts", hint="one prompt per line")
    return lines[:count]


def measure(call: Invocation, directory: Path, texts: list[str], max_tokens: int, temperature: float) -> DraftReport:
    """Raises: ConfigError when the model drafts nothing; CheckpointError and others of the engine."""
    from engine.request import SamplingParams
    from engine.spec_stats import measure_drafts

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    with call.ui.progress("loading", 1.0) as bar, open_engine(call, directory) as llm:
        bar.update(1.0, f"{len(texts)} prompts")
        longest = int(llm.engine.limits.max_model_len)
        ids = [llm.tokenizer.encode(text) for text in texts]
        report = measure_drafts(llm.engine, [one for one in ids if len(one) < longest], params)
        drafted = llm.engine.drafter.max_drafts if llm.engine.drafter is not None else 0
    if len(report.places) < drafted:
        raise ConfigError(
            f"only {len(report.places)} of {drafted} drafted places were ever reached", hint="more prompts, or more --max-tokens"
        )
    return report


def keep(call: Invocation, model: str, report: DraftReport) -> Path:
    """The temperatures in `dix.toml`."""
    from deepinfer_cli.tune.write import keep_tuned

    return keep_tuned(call.paths.user_config, KEY, f'"{report.temperatures}"', f"{model}, {report.rounds} rounds")


def show(call: Invocation, model: str, report: DraftReport, written: Path | None) -> None:
    if call.json:
        body: dict[str, Any] = {"model": model, "written": str(written) if written else None, "setting": report.temperatures}
        figures = {"rounds": report.rounds, "drafted": report.drafted, "accepted": report.accepted}
        places = [dataclasses.asdict(place) | {"acceptance": place.acceptance} for place in report.places]
        call.ui.document("dix.tune-drafts/1", body | figures | {"places": places})
        return
    from deepinfer_cli.report.tables import Grid, print_grid

    heads = ["place", "drafts", "kept", "predicted", "error", "temperature", "error then"]
    rows = [
        [
            str(place.place), f"{place.drafts:,}", f"{place.acceptance:.1%}", f"{place.mean_confidence:.1%}",
            f"{place.calibration_error:.3f}", f"{place.temperature:.3g}", f"{place.calibration_error_fitted:.3f}",
        ]
        for place in report.places
    ]  # fmt: skip
    print_grid(call.ui, Grid(f"{model}: {report.rounds:,} rounds, {report.tokens_per_round:.2f} tokens a round", heads, rows))
    call.ui.print(f'engine.{KEY} = "{report.temperatures}"', "accent")
    if written is not None:
        call.ui.note(f"wrote {written}", "quiet")


draft_confidence = command(_draft_confidence, sections=("engine",), defaults=SERVER_DEFAULTS, leave_out=("engine.model", "engine.dp"))
