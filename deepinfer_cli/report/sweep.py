"""A sweep as one table: a row per cell, means over its valid runs, and the point beyond which more load buys little."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_cli.report.stats import Summary
from deepinfer_cli.report.tables import Grid, show_share
from deepinfer_cli.units import show_number

# Beyond the knee, throughput grows by less than this and TTFT by more than that.
KNEE_GAIN, KNEE_TTFT = 0.03, 2.0
COLUMNS = (
    ("TTFT mean ms", "ttft", "mean", 1),
    ("TTFT p90 ms", "ttft", "p90", 1),
    ("TPOT mean ms", "tpot", "mean", 2),
    ("Output tok/s", "output_rate", "value", 1),
    ("Input tok/s", "input_rate", "value", 1),
    ("Tok/s per user", "user_rate", "value", 1),
)


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell's runs."""

    name: str
    runs: list[Summary]

    @property
    def valid(self) -> list[Summary]:
        return [run for run in self.runs if run.run.get("valid")]

    def mean(self, metric: str, stat: str) -> float | None:
        values = [value for run in self.valid if (value := run.value(metric, stat)) is not None]
        return sum(values) / len(values) if values else None


def sweep_grid(results: Sequence[CellResult]) -> Grid:
    rows: list[list[str | None]] = []
    for result in results:
        cells = [show_number(result.mean(metric, stat), digits) for _, metric, stat, digits in COLUMNS]
        failed = [run.value("failed_share") or 0.0 for run in result.runs]
        rows.append([result.name, f"{len(result.valid)} of {len(result.runs)}", *cells, show_share(max(failed, default=None))])
    return Grid("Sweep", ["", "valid", *(head for head, *_ in COLUMNS), "failed"], rows)


def knee(results: Sequence[CellResult]) -> str | None:
    """The last cell before more load brings under 3 % more tokens at more than twice the TTFT; cells in rising order of load."""
    for before, after in itertools.pairwise(results):
        rates = before.mean("output_rate", "value"), after.mean("output_rate", "value")
        ttft = before.mean("ttft", "mean"), after.mean("ttft", "mean")
        if None in (*rates, *ttft) or not rates[0] or not ttft[0]:
            continue
        assert rates[1] is not None
        assert ttft[1] is not None
        if rates[1] / rates[0] - 1 < KNEE_GAIN and ttft[1] / ttft[0] > KNEE_TTFT:
            return before.name
    return None
