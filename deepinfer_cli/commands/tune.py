"""`dix tune`: find the best value of a setting. Here: prefill intervals, on a running server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import complete
from deepinfer_cli.commands.serve import SERVER_DEFAULTS
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.lazy import Lazy
from deepinfer_cli.models import STAMP, is_tiny
from deepinfer_cli.options import Port, Url, command
from deepinfer_cli.outputs import check_output, write_text
from deepinfer_cli.servers import connect, read_key
from deepinfer_cli.units import parse_duration
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_cli.bench.recipe import Recipe
    from deepinfer_cli.tune.choice import Choice
    from deepinfer_cli.tune.measure import Bench, Measurement
    from deepinfer_cli.tune.simulator import StepCosts

NO_LOAD = "none"


def _prefill_interval(
    call: Invocation,
    values: Annotated[str, typer.Option("--values", metavar="N,N,…", help="Intervals to try.")] = "1,2,4,8,16,32,70,100",
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Runs of every value, alternating.")] = 3,
    load: Annotated[
        str, typer.Option("--load", metavar="RECIPE", autocompletion=complete.recipes, help="The load, or none for lone requests only.")
    ] = "prefill-interval",
    lone: Annotated[int, typer.Option("--lone", metavar="N", min=1, help="Lone requests of every run.")] = 8,
    lone_tokens: Annotated[int, typer.Option("--lone-tokens", metavar="N", min=1, help="Prompt of a lone request.")] = 32,
    itl_p99: Annotated[str, typer.Option("--itl-p99", metavar="TIME", help="Refuse values whose ITL p99 may be above this.")] = "",
    objective: Annotated[str, typer.Option("--objective", metavar="ttft|throughput", help="What to make best.")] = "ttft",
    write: Annotated[bool, typer.Option("--write", help="Put the chosen value into dix.toml and leave the server with it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write although the model is the embedded one.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one page with plots.")] = None,
    port: Port = None,
    url: Url = None,
) -> int:
    """Measure how long prompts and answers wait at several prefill intervals, and pick one.

      dix tune prefill-interval --itl-p99 50ms
      dix tune prefill-interval --values 2,100 --load none --repeats 1      lone requests only
      dix tune prefill-interval --itl-p99 50ms --write                       into dix.toml

    A simulator predicts every value from the measured times of single steps. Exit code 1 when no value keeps the limit.
    """
    from deepinfer_cli.bench.recipe import load_recipe
    from deepinfer_cli.tune.choice import OBJECTIVES, choose
    from deepinfer_cli.tune.measure import KEY, Bench, calibrate, check_load, lone_recipe

    tried = parse_values(values)
    limit_ms = parse_duration(itl_p99, "--itl-p99") * 1e3 if itl_p99 else None
    if load == NO_LOAD and (limit_ms is not None or objective != "ttft"):
        raise ConfigError("lone requests alone say nothing about ITL or throughput", hint="leave out --load none")
    if objective not in OBJECTIVES:
        raise ConfigError(f"--objective is {objective!r}", hint=f"one of {', '.join(OBJECTIVES)}")
    recipe = load_recipe("prefill-interval" if load == NO_LOAD else load)
    check_load(recipe)
    bench = Bench(call, connect(call, port, url), read_key(call), lambda text: call.ui.note(text, "quiet"))
    if write and is_tiny(bench.model) and not force:
        raise ConfigError("times of the embedded model say nothing about another", hint="leave out --write, or --force")
    if html is not None:
        check_output(html)
    try:
        costs = calibrate(bench, recipe, lone_tokens)
        plan = Plan(recipe, lone_recipe(recipe, lone, lone_tokens), tried, repeats, load != NO_LOAD)
        measured, costs = measure_all(bench, plan, costs)
    finally:
        bench.restore()
    choice = choose(measured, objective=objective, itl_p99_ms=limit_ms, default=int(str(SERVER_DEFAULTS[f"engine.{KEY}"])))
    written = keep(call, bench, choice, measured) if write else None
    show(call, bench, measured, choice, costs, html, written)
    return ExitCode.OK if choice.value is not None else ExitCode.NO


def parse_values(text: str) -> list[int]:
    try:
        found = sorted({int(item) for item in text.split(",")})
    except ValueError:
        raise ConfigError(f"--values is {text!r}", hint="for example --values 1,2,10,100") from None
    if not found or found[0] < 1:
        raise ConfigError(f"--values is {text!r}", hint="intervals are at least 1 decode step")
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured at every value: lone requests, and the load unless there is none."""

    load: Recipe
    lone: Recipe
    values: list[int]
    repeats: int
    loaded: bool


def measure_all(bench: Bench, plan: Plan, costs: StepCosts) -> tuple[list[Measurement], StepCosts]:
    """Every value in alternating order, and the simulator beside them with the step times that it used."""
    import pandas as pd

    from deepinfer_cli.bench.cells import in_order
    from deepinfer_cli.tune.measure import Measurement, columns, load_sample, lone_sample, refined, under_load

    out = [Measurement(value) for value in plan.values]
    alone, loads, gaps = [], [], []
    order = in_order(len(plan.values), plan.repeats, "abba")
    for done, index in enumerate(order):
        place = f" · {done + 1} of {len(order)}"
        summary = bench.run(plan.lone, plan.values[index], "lone", place)
        alone.append(columns(summary))
        sample = lone_sample(summary)
        out[index].run_ids.append(summary.name)
        if plan.loaded:
            summary = bench.run(plan.load, plan.values[index], "load", place)
            loads.append(columns(summary))
            gaps.append(summary.gaps["gap_ms"])
            sample = load_sample(summary, sample)
            out[index].run_ids.append(summary.name)
        out[index].runs.append(sample)
    lone = pd.concat(alone)
    costs = refined(costs, lone, bench.chunk_tokens)
    load_costs = under_load(costs, pd.concat(loads), pd.concat(gaps), bench.chunk_tokens) if loads else costs
    tokens = [int(pd.concat(frames)["prompt_tokens"].median()) for frames in (alone, loads or alone)]
    predict(bench, plan, out, (costs, tokens[0]), (load_costs, tokens[1]))
    return out, costs


def predict(bench: Bench, plan: Plan, measured: list[Measurement], lone: tuple[StepCosts, int], load: tuple[StepCosts, int]) -> None:
    """The simulator's account of every value; lone, load: step times and prompt tokens of each kind of run."""
    from deepinfer_cli.tune.measure import simulated_sample, workload
    from deepinfer_cli.tune.simulator import Simulated, SimulatedGroup, simulate

    def play(recipe: Recipe, facts: tuple[StepCosts, int], value: int) -> list[Simulated]:
        group = SimulatedGroup(
            ranks=bench.ranks,
            attempt=bench.attempt,
            any_=value,
            costs=facts[0],
            chunk_tokens=bench.chunk_tokens,
            rule=bench.rule,
        )
        return simulate(workload(recipe, facts[1]), group)

    for m in measured:
        together = play(plan.load, load, m.value) if plan.loaded else []
        m.simulated = simulated_sample(play(plan.lone, lone, m.value), together, lone[0], load[0])


def keep(call: Invocation, bench: Bench, choice: Choice, measured: list[Measurement]) -> Path | None:
    """The chosen value in `dix.toml` and on the server. Without a choice nothing is written."""
    from deepinfer_cli.tune.measure import KEY
    from deepinfer_cli.tune.write import keep_tuned

    if choice.value is None:
        return None
    runs = [run for m in measured for run in m.run_ids]
    facts = f"{bench.model}, {bench.ranks} ranks, runs {runs[0]} to {runs[-1]}"
    path = keep_tuned(call.paths.user_config, KEY, choice.value, facts)
    bench.set(choice.value)
    return path


def show(
    call: Invocation, bench: Bench, measured: list[Measurement], choice: Choice, costs: StepCosts, html: Path | None, written: Path | None
) -> None:
    from deepinfer_cli.report.tables import print_grid
    from deepinfer_cli.tune.show import costs_line, page, plain, result_grid, simulation_grid

    stamp = STAMP if is_tiny(bench.model) else None
    head = f"{bench.model} · {bench.ranks} ranks · prefill_attempt_interval {bench.attempt}"
    if html is not None:
        write_text(html, page(measured, choice, costs, head, stamp))
    if call.json:
        body = {"model": bench.model, "ranks": bench.ranks, "note": stamp, "written": str(written) if written else None}
        call.ui.document("dix.tune/1", body | plain(measured, choice, costs))
        return
    call.ui.print(head, "accent")
    for grid in (result_grid(measured, choice), simulation_grid(measured)):
        print_grid(call.ui, grid)
    call.ui.print()
    call.ui.print(costs_line(costs), "quiet")
    if stamp:
        call.ui.print(stamp, "warning")
    chosen = "no interval" if choice.value is None else f"prefill_any_interval = {choice.value}"
    call.ui.print(f"{chosen}: {choice.reason}", "good" if choice.value is not None else "bad", prose=True)
    for path in (html, written):
        if path is not None:
            call.ui.note(f"wrote {path}", "quiet")


prefill_interval = command(_prefill_interval)
SUMMARY = "Measure and simulate prefill intervals, and pick one."
TABLE = {
    "prefill-interval": Lazy("deepinfer_cli.commands.tune:prefill_interval", SUMMARY),
    "draft-confidence": Lazy("deepinfer_cli.commands.tune_drafts:draft_confidence", "Fit temperatures to the drafter's confidences."),
}
