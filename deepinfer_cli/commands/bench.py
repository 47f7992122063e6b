"""`dix bench`: measure a server with a recipe and keep the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import complete
from deepinfer_cli.bench.recipe import load_recipe, recipe_names
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.lazy import Lazy
from deepinfer_cli.options import AnyUrl, Label, Port, command
from deepinfer_cli.servers import find_url, read_key
from deepinfer_cli.ui import Column
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_cli.bench.campaign import Campaign, Plan


def _run(
    call: Invocation,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", autocompletion=complete.recipes, help="A name from dix bench list, or a TOML file.")
    ],
    port: Port = None,
    url: AnyUrl = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Runs; several give intervals between runs.")] = 1,
    label: Label = None,
) -> int:
    """Run a recipe against a server and keep the run.

      dix bench run smoke
      dix bench run smoke --repeats 5 --label build=new
      dix bench run smoke --url http://other:8000

    A recipe that varies a value runs once per value. Exit code 5 when too many requests failed.
    Next: dix report last
    """
    from deepinfer_cli.bench.campaign import Plan
    from deepinfer_cli.bench.cells import cells

    chosen = load_recipe(recipe)
    plan = Plan(cells(chosen, chosen.vary), find_url(call, port, url), repeats, labels=parse_labels(label or []))
    return carry_out(call, plan, resume=False)


def _sweep(
    call: Invocation,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", autocompletion=complete.recipes, help="A name from dix bench list, or a TOML file.")
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="KEY=V1,V2", help="A recipe's key, url, or a setting such as engine.max_num_seqs; may be repeated."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="R", min=1, help="Runs of every cell.")] = 1,
    order: Annotated[str, typer.Option("--order", metavar="abba|random", help="How the runs of repeated cells alternate.")] = "abba",
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Served for cells that vary a setting of the server.")] = "tiny",
    port: Port = None,
    url: AnyUrl = None,
    label: Label = None,
    resume: Annotated[str, typer.Option("--resume", metavar="SWEEP", help="Go on with a sweep: skip its valid runs.")] = "",
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first run that is not valid.")] = False,
) -> int:
    """Run a recipe once per combination of values, alternating.

      dix bench sweep smoke --vary load.concurrency=1,2,4,8
      dix bench sweep smoke --vary url=http://old:8000,http://new:8000 --repeats 5
      dix bench sweep chat --vary engine.max_num_seqs=4,16 --model tiny

    Exit code 5 when a run is not valid.
    Next: dix report SWEEP --html sweep.html
    """
    from deepinfer_cli.bench.campaign import Plan
    from deepinfer_cli.bench.cells import ORDERS, cells, parse_varied

    if order not in ORDERS:
        raise ConfigError(f"--order is {order!r}", hint=f"one of {', '.join(ORDERS)}")
    chosen = load_recipe(recipe)
    varied = {**chosen.vary, **parse_varied(vary or [])}
    if not varied:
        raise ConfigError(f"nothing varies in {chosen.name}", hint="--vary load.concurrency=1,2,4")
    all_cells = cells(chosen, varied)
    fixed = "" if all(cell.url or cell.engine for cell in all_cells) else find_url(call, port, url)
    named = {"id": resume} if resume else {}
    plan = Plan(all_cells, fixed, repeats, order, model, parse_labels(label or []), fail_fast, **named)
    return carry_out(call, plan, resume=bool(resume))


def carry_out(call: Invocation, plan: Plan, *, resume: bool) -> int:
    """Run a plan and show what came of it."""
    from deepinfer_cli.bench.campaign import Conductor

    if plan.many:
        runs = len(plan.cells) * plan.repeats
        call.ui.note(f"sweep {plan.id} · {len(plan.cells)} cells · {runs} runs · go on after a break with --resume {plan.id}", "accent")
    done = Conductor(call, plan, read_key(call)).run(resume=resume)
    if done.skipped:
        call.ui.note(f"{done.skipped} runs were there already", "quiet")
    if plan.many:
        show_sweep(call, plan, done)
        return done.code
    for folder in done.folders[0]:
        show_run(call, folder)
    return done.code


def show_sweep(call: Invocation, plan: Plan, done: Campaign) -> None:
    from deepinfer_cli.report.stats import summarize
    from deepinfer_cli.report.sweep import CellResult, knee, sweep_grid
    from deepinfer_cli.report.tables import print_grid, summary_document

    pairs = zip(plan.cells, done.folders, strict=True)
    results = [CellResult(cell.name, [summarize(folder) for folder in folders]) for cell, folders in pairs]
    load = set(plan.cells[0].values) <= {"load.concurrency", "load.rate"}
    at = knee(results) if load else None
    if call.json:
        cells = [{"cell": result.name, "runs": [summary_document(run) for run in result.runs]} for result in results]
        call.ui.event("sweep", id=plan.id, cells=cells, knee=at, failures=done.failures)
        return
    print_grid(call.ui, sweep_grid(results))
    for stamp in sorted({run.stamp for result in results for run in result.runs if run.stamp}):
        call.ui.print(stamp, "warning")
    if at is not None:
        call.ui.note(f"knee: beyond {at} throughput hardly grows and TTFT more than doubles", "quiet")
    call.ui.note(f"next: dix report {plan.id} --html sweep.html", "quiet")


def show_run(call: Invocation, folder: Path) -> None:
    from deepinfer_cli.report.stats import summarize
    from deepinfer_cli.report.tables import print_summary, summary_document

    summary = summarize(folder)
    if call.json:
        call.ui.event("run", **summary_document(summary))
    else:
        print_summary(call.ui, summary, short=True)
        call.ui.note(f"kept in {folder}", "quiet")
        call.ui.note("next: dix report", "quiet")


def parse_labels(pairs: list[str]) -> dict[str, str]:
    out = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ConfigError(f"--label {pair!r} is not KEY=VALUE", hint="for example --label build=new")
        out[key] = value
    return out


def _list(call: Invocation) -> int:
    """List the recipes that come with dix.

    Next: dix bench run smoke
    """
    recipes = [load_recipe(name) for name in recipe_names()]
    if call.json:
        call.ui.document("dix.recipes/1", {"recipes": [recipe.plain() for recipe in recipes]})
        return ExitCode.OK
    rows = [(r.name, r.load.arrival, r.requests, r.description) for r in recipes]
    call.ui.table(
        [Column("recipe", right=False, role="accent"), Column("load", right=False), Column("requests"), Column("", right=False)], rows
    )
    return ExitCode.OK


run = command(_run)
sweep = command(_sweep)
list_ = command(_list)
TABLE = {
    "agentx": Lazy("deepinfer_cli.commands.bench_agentx:agentx", "Replay recorded coding-agent sessions and keep the run."),
    "run": Lazy("deepinfer_cli.commands.bench:run", "Run a recipe against a server and keep the run."),
    "sweep": Lazy("deepinfer_cli.commands.bench:sweep", "Run a recipe once per combination of values, alternating."),
    "engine": Lazy("deepinfer_cli.commands.bench_engine:engine", "Measure prefill and decode of the engine without a server."),
    "kernels": Lazy("deepinfer_cli.commands.bench_ops:kernels", "Measure single operations against this machine's ceilings."),
    "layers": Lazy("deepinfer_cli.commands.bench_ops:layers", "Measure whole layers of the released shapes against their byte floor."),
    "list": Lazy("deepinfer_cli.commands.bench:list_", "List the recipes."),
}
