"""Figures as PNG files, for slides and papers: the same numbers as the page, drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_cli.outputs import output
from deepinfer_cli.report.plots import in_flight, thinned
from deepinfer_cli.report.stats import Summary
from deepinfer_cli.report.svg import label, log_ticks

DISTRIBUTIONS = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("End to end", "e2e_ms"))


def write_png(summaries: list[Summary], folder: Path) -> list[Path]:
    """Distributions, hit rate by turn, the time line, and throughput against interactivity; one file each."""
    import matplotlib as mpl

    mpl.use("Agg")
    made = [_distribution(summaries, name, column, folder) for name, column in DISTRIBUTIONS]
    return [*made, _hit_rate(summaries, folder), _timeline(summaries[0], folder), _frontier(summaries, folder)]


def _distribution(summaries: list[Summary], name: str, column: str, folder: Path) -> Path:
    figure, axes = _new(summaries, f"{name} distribution")
    for summary in summaries:
        values = thinned(np.sort(summary.good[column].dropna().to_numpy(dtype=np.float64)))
        if len(values):
            axes.step(values, (np.arange(len(values)) + 1) / len(values), where="post", label=summary.title)
            axes.set_xscale("log")
    if axes.get_xscale() == "log":
        _plain_ticks(axes)
    axes.yaxis.set_major_formatter(lambda share, _place: f"{share:.0%}")
    axes.set(xlabel=f"{name} (ms, logarithmic)", ylabel="share of requests", ylim=(0, 1.02))
    return _save(figure, axes, folder / f"{column.removesuffix('_ms')}.png")


def _hit_rate(summaries: list[Summary], folder: Path) -> Path:
    figure, axes = _new(summaries, "Hit rate by turn")
    for summary in summaries:
        turns = summary.groups("turn")
        rates = [summary.value("hit_rate_client", group=g) for g in turns]
        shown = [float("nan") if rate is None else rate * 100 for rate in rates]
        axes.plot([int(g.split()[1]) + 1 for g in turns], shown, marker="o", label=summary.title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="turn", ylabel="hit rate (%)", ylim=(0, 100))
    return _save(figure, axes, folder / "hit_rate.png")


def _timeline(summary: Summary, folder: Path) -> Path:
    figure, axes = _new([summary], f"Requests in flight of {summary.title}")
    if len(summary.requests):
        line = in_flight(summary.requests, float(summary.requests["start_s"].min()))
        axes.step(line.x, line.y, where="post")
        axes.fill_between(line.x, line.y, step="post", alpha=0.15)
    axes.set(xlabel="seconds since the first request", ylabel="requests in flight")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    return _save(figure, axes, folder / "timeline.png", legend=False)


def _frontier(summaries: list[Summary], folder: Path) -> Path:
    figure, axes = _new(summaries, "Throughput against interactivity")
    for summary in summaries:
        user, output = summary.value("user_rate"), summary.value("output_rate")
        if user is not None and output is not None:
            axes.scatter([user], [output], label=summary.title)
    axes.set(xlabel="tok/s per user (median)", ylabel="output tok/s")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return _save(figure, axes, folder / "frontier.png")


def _plain_ticks(axes: Any) -> None:
    """The page's ticks: 200 and 0.5 in place of powers of ten."""
    from matplotlib.ticker import NullFormatter

    ticks = log_ticks(*axes.get_xlim())
    axes.set_xticks(ticks, [label(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())


def _new(summaries: list[Summary], title: str) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    stamps = {s.stamp for s in summaries if s.stamp}
    axes.set_title(f"{title}\n({', '.join(sorted(stamps))})" if stamps else title, fontsize=11, loc="left")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path, *, legend: bool = True) -> Path:
    import matplotlib.pyplot as plt

    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)
    with output(path) as place:
        figure.savefig(place, dpi=150)
    plt.close(figure)
    return path
