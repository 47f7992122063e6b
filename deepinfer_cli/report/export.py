"""Numbers out: long-form CSV and Parquet, PNG figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from deepinfer_cli.report.plots import thinned
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
    long_form(summaries).to_csv(path, index=False)


def write_parquet(summaries: list[Summary], path: Path) -> None:
    long_form(summaries).to_parquet(path, index=False)


def write_png(summaries: list[Summary], folder: Path) -> list[Path]:
    """TTFT and TPOT distributions, hit rate by turn, and percentiles by run, as PNG files."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for metric, column in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("End to end", "e2e_ms")):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for summary in summaries:
            values = thinned(np.sort(summary.good[column].dropna().to_numpy(dtype=np.float64)))
            if len(values):
                axes.step(values, (np.arange(len(values)) + 1) / len(values), where="post", label=summary.title)
        axes.set(xlabel=f"{metric} (ms)", ylabel="share of requests", title=_title(f"{metric} distribution", summaries), ylim=(0, 1.02))
        axes.legend(fontsize=7, frameon=False)
        written.append(_save(figure, folder / f"{column.removesuffix('_ms')}.png"))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for summary in summaries:
        turns = summary.groups("turn")
        rates = [summary.value("hit_rate_client", group=g) for g in turns]
        axes.plot(
            [int(g.split()[1]) + 1 for g in turns], [float("nan") if r is None else r * 100 for r in rates], marker="o", label=summary.title
        )
    axes.set(xlabel="turn", ylabel="hit rate (%)", title=_title("Hit rate by turn", summaries), ylim=(0, 100))
    axes.legend(fontsize=7, frameon=False)
    written.append(_save(figure, folder / "hit_rate.png"))
    return written


def _save(figure: object, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150)  # type: ignore[attr-defined]
    plt.close(figure)  # type: ignore[arg-type]
    return path


def _title(text: str, summaries: list[Summary]) -> str:
    stamps = {s.stamp for s in summaries if s.stamp}
    return f"{text}\n({', '.join(sorted(stamps))})" if stamps else text
