"""`dix report`: show runs, compare them with a baseline, export the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer_cli import complete
from deepinfer_cli.bench.runs import find_runs
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import command
from deepinfer_cli.outputs import write_text
from deepinfer_cli.report import export
from deepinfer_cli.report.compare import Result, compare, different_work, worst_regression
from deepinfer_cli.report.stats import Summary, summarize
from deepinfer_cli.report.tables import print_grid, print_summary, summary_document
from deepinfer_cli.report.verdicts import comparison_grid, repeats_grid
from deepinfer_cli.units import parse_fraction
from hicache.errors import ConfigError


def _report(
    call: Invocation,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", autocompletion=complete.runs, help="last, a run, a label, a recipe or a path.  [default: last]"),
    ] = None,
    baseline: Annotated[
        list[str] | None, typer.Option("--baseline", metavar="RUN", help="Compare with these runs; may be repeated.")
    ] = None,
    metric: Annotated[str, typer.Option("--metric", metavar="NAME", help="Compare only numbers whose name holds this.")] = "",
    confidence: Annotated[float, typer.Option("--confidence", metavar="X", min=0.5, max=0.999, help="Of the intervals.")] = 0.95,
    margin: Annotated[str, typer.Option("--margin", metavar="PCT", help="Changes inside this count as the same.")] = "2%",
    fail_over: Annotated[str, typer.Option("--fail-over", metavar="PCT", help="Exit 1 when a whole interval is worse than this.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Compare different work all the same.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write every number, long form.")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", metavar="FILE", help="The same as Parquet.")] = None,
    explain: Annotated[str, typer.Option("--explain", metavar="METRIC", help="Say what a number means, and print nothing else.")] = "",
    png: Annotated[Path | None, typer.Option("--png", metavar="DIR", help="Write figures as PNG files.")] = None,
) -> int:
    """Show runs, compare them with a baseline, export the numbers.

      dix report                                    the last run
      dix report --html report.html --csv numbers.csv
      dix report new --baseline base --fail-over 3%
      dix report --explain TPOT                     what a number means

    Exit code 1: a regression past --fail-over. 5: the run is not valid, or the runs cannot be compared.
    """
    if explain:
        return show_meaning(call, explain)
    chosen = load(call, runs or ["last"])
    base = load(call, baseline or [])
    result = (
        compare(base, chosen, confidence=confidence, margin=parse_fraction(margin, "--margin"), metric=metric, force=force)
        if base
        else None
    )
    limit = parse_fraction(fail_over, "--fail-over") if fail_over else None
    if limit is not None and result is None:
        raise ConfigError("--fail-over needs something to compare with", hint="--baseline RUN")
    written = write_files(base + chosen, result, html, csv, parquet, png)
    if call.json:
        show_json(call, chosen, base, result, written)
    else:
        show(call, chosen, result, confidence)
        for path in written:
            call.ui.note(f"wrote {path}", "quiet")
    if limit is not None and result is not None and worst_regression(result) > limit:
        return ExitCode.NO
    return ExitCode.OK if all(s.run.get("valid") for s in chosen) else ExitCode.INVALID


def show_meaning(call: Invocation, word: str) -> int:
    import dataclasses

    from deepinfer_cli.report.explain import explain

    found = explain(word)
    if call.json:
        call.ui.document("dix.explain/1", {"metrics": [dataclasses.asdict(meaning) for meaning in found]})
        return ExitCode.OK
    for index, meaning in enumerate(found):
        if index:
            call.ui.print()
        call.ui.print(f"{meaning.name}{f' ({meaning.unit})' if meaning.unit else ''}", "accent")
        call.ui.print(meaning.what)
        call.ui.print(f"  = {meaning.formula}")
        if meaning.beware:
            call.ui.print(f"  beware: {meaning.beware}", "warning")
    return ExitCode.OK


def load(call: Invocation, names: list[str]) -> list[Summary]:
    folders = [folder for name in names for folder in find_runs(call.paths.runs, name)]
    return [summarize(folder) for folder in dict.fromkeys(folders)]


def show(call: Invocation, chosen: list[Summary], result: Result | None, confidence: float) -> None:
    if result is not None:
        show_comparison(call, chosen, result)
        return
    for index, summary in enumerate(chosen):
        if index:
            call.ui.print()
        print_summary(call.ui, summary)
    if len(chosen) > 1 and not different_work(chosen, []):
        print_grid(call.ui, repeats_grid(chosen, confidence))


def show_comparison(call: Invocation, chosen: list[Summary], result: Result) -> None:
    if result.banner:
        call.ui.print(result.banner, "bad")
    print_grid(call.ui, comparison_grid(result))
    for stamp in sorted({s.stamp for s in chosen if s.stamp}):
        call.ui.print(stamp, "warning")
    for note in result.notes:
        call.ui.note(f"note: {note}", "quiet")


def show_json(call: Invocation, chosen: list[Summary], base: list[Summary], result: Result | None, written: list[Path]) -> None:
    import dataclasses

    lines = [dataclasses.asdict(line) for line in result.lines] if result is not None else None
    body = {
        "runs": [summary_document(s) for s in chosen],
        "baseline": [s.name for s in base] or None,
        "comparison": lines,
        "notes": result.notes if result is not None else [],
        "files": [str(path) for path in written],
    }
    call.ui.document("dix.report/1", body)


def write_files(
    summaries: list[Summary], result: Result | None, html: Path | None, csv: Path | None, parquet: Path | None, png: Path | None
) -> list[Path]:
    written = []
    if html is not None:
        from deepinfer_cli.report.html import page

        write_text(html, page(summaries, result))
        written.append(html)
    if csv is not None:
        export.write_csv(summaries, csv)
        written.append(csv)
    if parquet is not None:
        export.write_parquet(summaries, parquet)
        written.append(parquet)
    if png is not None:
        from deepinfer_cli.report.png import write_png

        written += write_png(summaries, png)
    return written


report = command(_report)
