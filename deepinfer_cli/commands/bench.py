"""`dix bench`: measure a server with a recipe and keep the run."""

from __future__ import annotations

from typing import Annotated

import typer

from deepinfer_cli import complete
from deepinfer_cli.bench.recipe import load_recipe, recipe_names
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.lazy import Lazy
from deepinfer_cli.options import command
from deepinfer_cli.servers import connect, read_key
from deepinfer_cli.ui import Column
from hicache.errors import ConfigError


def _run(
    call: Invocation,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", autocompletion=complete.recipes, help="A name from dix bench list, or a TOML file.")
    ],
    port: Annotated[int | None, typer.Option("--port", metavar="P", help="Port on this machine.  [default: the running server's]")] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="Any OpenAI-compatible server.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Runs; several give intervals between runs.")] = 1,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="Remember this with the run; may be repeated.")] = None,
) -> int:
    """Run a recipe against a server and keep the run.

      dix bench run smoke
      dix bench run smoke --repeats 5 --label build=new
      dix bench run smoke --url http://other:8000

    Exit code 5 when too many requests failed.
    Next: dix report last
    """
    from deepinfer_cli.bench.harness import Run, preflight

    chosen = load_recipe(recipe)
    labels = parse_labels(label or [])
    api = connect(call, port, url)
    worst = 0
    for index in range(repeats):
        server = preflight(api, chosen)
        for note in server.notes if index == 0 else []:
            call.ui.warn(note)
        run = Run(call, chosen, server, api, read_key(call), labels)
        call.ui.note(f"{chosen.name} · {server.model} at {server.url} · {chosen.requests} requests · run {index + 1} of {repeats}", "quiet")
        verdict, code = run.execute()
        for reason in verdict.reasons:
            call.ui.warn(f"not valid: {reason}")
        show_run(call, run.folder)
        worst = max(worst, code)
        if code == ExitCode.INTERRUPTED:
            break
    return worst


def show_run(call: Invocation, folder: object) -> None:
    from pathlib import Path

    from deepinfer_cli.report.stats import summarize
    from deepinfer_cli.report.tables import print_summary, summary_document

    summary = summarize(Path(str(folder)))
    if call.json:
        call.ui.event("run", **summary_document(summary))
    else:
        print_summary(call.ui, summary, short=True)
        call.ui.note(f"kept in {folder} · next: dix report", "quiet")


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
list_ = command(_list)
TABLE = {
    "agentx": Lazy("deepinfer_cli.commands.bench_agentx:agentx", "Replay recorded coding-agent sessions and keep the run."),
    "run": Lazy("deepinfer_cli.commands.bench:run", "Run a recipe against a server and keep the run."),
    "list": Lazy("deepinfer_cli.commands.bench:list_", "List the recipes."),
}
