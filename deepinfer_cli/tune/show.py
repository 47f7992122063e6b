"""The result of tuning as tables, a page and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import Any

from deepinfer_cli.report.html import banner, document, figures_html, table
from deepinfer_cli.report.plots import Figure
from deepinfer_cli.report.svg import Series, line_chart
from deepinfer_cli.report.tables import Grid
from deepinfer_cli.tune.choice import Choice
from deepinfer_cli.tune.measure import Measurement
from deepinfer_cli.tune.simulator import StepCosts
from deepinfer_cli.units import show_number

NAMES = {
    "wait_steps": ("Wait steps", 1),
    "queue_ms": ("Lone queue ms", 1),
    "lone_ttft_ms": ("Lone TTFT ms", 1),
    "ttft_ms": ("TTFT mean ms", 1),
    "ttft_p90_ms": ("TTFT p90 ms", 1),
    "itl_p99_ms": ("ITL p99 ms", 1),
    "tpot_ms": ("TPOT mean ms", 1),
    "output_tok_s": ("Output tok/s", 1),
}


def difference(m: Measurement, name: str) -> float | None:
    """Simulated over measured, less one."""
    measured, simulated = m.mean(name), getattr(m.simulated, name)
    return None if not measured or simulated is None else simulated / measured - 1


def result_grid(measured: Sequence[Measurement], choice: Choice) -> Grid:
    shown = [name for name in NAMES if any(m.values(name) for m in measured)]
    rows: list[list[str | None]] = [
        [str(m.value), str(len(m.runs)), *(show_number(m.mean(name), NAMES[name][1]) for name in shown), verdict]
        for m, verdict in zip(measured, choice.verdicts, strict=True)
    ]
    heads = ["Interval", "runs", *(NAMES[name][0] for name in shown), ""]
    return Grid("Measured", heads, rows, left=frozenset({len(heads) - 1}), note=choice.reason)


def simulation_grid(measured: Sequence[Measurement]) -> Grid:
    """What the simulator says, and by how much it is off."""
    shown = [name for name in NAMES if any(m.values(name) for m in measured)]
    rows: list[list[str | None]] = []
    for m in measured:
        cells: list[str | None] = []
        for name in shown:
            off = difference(m, name)
            apart = "" if off is None else f" ({off * 100:+.0f} %)".replace("-", "−")
            cells.append(show_number(getattr(m.simulated, name), NAMES[name][1]) + apart)
        rows.append([str(m.value), *cells])
    note = "From the measured times of single steps; in brackets: simulated against measured."
    return Grid("Simulated", ["Interval", *(NAMES[name][0] for name in shown)], rows, left=frozenset(), note=note)


def costs_line(costs: StepCosts) -> str:
    return (
        f"step times: vote {costs.vote_s * 1e3:,.2f} ms, {costs.wake_s * 1e3:,.1f} ms to wake"
        f" · decode {costs.decode_s * 1e3:,.1f} ms + {costs.decode_row_s * 1e3:,.2f} a sequence"
        f" · prompt {costs.prompt_s * 1e3:,.1f} ms + {costs.prompt_token_s * 1e6:,.0f} µs a token"
        f" · {costs.tokens_per_step:,.2f} tokens a step · {costs.overhead_s * 1e3:,.1f} ms outside the engine"
    )


def figures(measured: Sequence[Measurement]) -> list[Figure]:
    loaded = any(m.values("ttft_ms") for m in measured)
    made = [_curve(measured, "wait_steps", "Decode steps that a lone request waits", "steps")]
    made.append(_curve(measured, "lone_ttft_ms", "TTFT of a lone request", "ms"))
    if loaded:
        made.append(_curve(measured, "ttft_p90_ms", "TTFT p90 under the load", "ms"))
        made.append(_curve(measured, "itl_p99_ms", "ITL p99 under the load", "ms"))
    return [figure for figure in made if figure.svg]


def _curve(measured: Sequence[Measurement], name: str, title: str, unit: str) -> Figure:
    found = [m for m in measured if m.values(name)]
    values = [float(m.value) for m in found]
    series = [
        Series("measured", values, [m.mean(name) or 0.0 for m in found], color=0),
        Series("simulated", values, [getattr(m.simulated, name) or 0.0 for m in found], color=1, dashed=True),
    ]
    rows = [[str(m.value), show_number(m.mean(name)), show_number(getattr(m.simulated, name))] for m in found]
    svg = line_chart(title, series, "prefill_any_interval (decode steps, logarithmic)", f"{unit}", log=True, ticks=values)
    grid = Grid(title, ["Interval", f"measured {unit}", f"simulated {unit}"], rows, left=frozenset())
    return Figure(
        title, "Measured on the running server, and simulated from its step times.", svg, grid, [(0, "measured"), (1, "simulated")]
    )


def page(measured: Sequence[Measurement], choice: Choice, costs: StepCosts, head: str, stamp: str | None) -> str:
    shown = (result_grid(measured, choice), simulation_grid(measured))
    grids = "".join(f"<section><h3>{escape(grid.title)}</h3>{table(grid)}</section>" for grid in shown)
    parts = [banner(stamp)] if stamp else []
    parts.append(f"<article><h2>{escape(head)}</h2>{grids}<p class='quiet'>{escape(costs_line(costs))}</p></article>")
    return document("dix tune prefill-interval", [*parts, figures_html(figures(measured))])


def plain(measured: Sequence[Measurement], choice: Choice, costs: StepCosts) -> dict[str, Any]:
    values = [
        {
            "value": m.value,
            "runs": [dataclasses.asdict(run) for run in m.runs],
            "run_ids": m.run_ids,
            "mean": {name: m.mean(name) for name in NAMES},
            "simulated": dataclasses.asdict(m.simulated),
            "difference": {name: difference(m, name) for name in NAMES},
            "verdict": verdict,
        }
        for m, verdict in zip(measured, choice.verdicts, strict=True)
    ]
    return {"chosen": choice.value, "reason": choice.reason, "step_costs": dataclasses.asdict(costs), "values": values}
