"""Numbers out: long-form CSV and Parquet."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from deepinfer_cli.outputs import output
from deepinfer_cli.report.stats import Summary

COLUMNS = ["run", "group", "metric", "stat", "value", "unit", "n", "low", "high", "note"]


def long_form(summaries: list[Summary]) -> pd.DataFrame:
    """One row per number: run, group, metric, stat, value, unit, n, low, high, and the note that must travel with it."""
    rows = [
        [s.name, r.group, r.metric, r.stat, r.value, r.unit, r.n, r.low, r.high, s.stamp or ""] for s in summaries for r in s.rows
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return frame.astype({"value": "float64", "low": "float64", "high": "float64", "n": "int64"})


def write_csv(summaries: list[Summary], path: Path) -> None:
    with output(path) as place:
        long_form(summaries).to_csv(place, index=False)


def write_parquet(summaries: list[Summary], path: Path) -> None:
    with output(path) as place:
        long_form(summaries).to_parquet(place, index=False)
