"""The figures of a report, each with the table of what it shows."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from deepinfer_cli.report.intervals import Array
from deepinfer_cli.report.server_side import PARTS
from deepinfer_cli.report.stats import Summary
from deepinfer_cli.report.svg import Series, Strip, bar_chart, distribution_chart, scatter_chart, stacked_chart, timeline_chart
from deepinfer_cli.report.tables import Grid, show_share
from deepinfer_cli.units import show_number

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MOST_POINTS = 1200  # a page stays small and quick; more points than pixels show nothing new
MOST_MARKS = 200


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot: what it says, the picture, and the same as numbers."""

    title: str
    caption: str
    svg: str
    grid: Grid
    legend: list[tuple[int, str]]
    wide: bool = False


def figures(summaries: list[Summary]) -> list[Figure]:
    """All figures that have something to show, for one run or several."""
    made = [
        distribution(summaries, "TTFT", "ttft_ms", "Time to first token"),
        distribution(summaries, "TPOT", "tpot_ms", "Decode time per token"),
        ttft_parts(summaries),
        hit_rate_by_turn(summaries),
        hit_rate_by_rank(summaries),
        ttft_by_work(summaries),
        *(timeline(summary, len(summaries) > 1) for summary in summaries[:4]),
    ]
    if len(summaries) > 1:
        made.append(frontier(summaries))
    return [figure for figure in made if figure.svg]


def _legend(summaries: list[Summary]) -> list[tuple[int, str]]:
    return [(i, s.title) for i, s in enumerate(summaries)] if len(summaries) > 1 else []


def _good(summary: Summary, *columns: str, also: tuple[str, ...] = ()) -> pd.DataFrame:
    """Some columns of the good requests, without rows that lack a value in one of `columns`."""
    return summary.good[[*columns, *also]].dropna(subset=list(columns))


def thinned(values: Array) -> Array:
    """As many quantiles of sorted values as a figure can show."""
    return values if len(values) <= MOST_POINTS else np.quantile(values, np.linspace(0, 1, MOST_POINTS))


def spread(count: int) -> NDArray[np.int64]:
    """Indices of as many of `count` points as a figure can show, evenly spaced, both ends among them."""
    return np.linspace(0, count - 1, min(count, MOST_POINTS)).astype(np.int64)


def distribution(summaries: list[Summary], name: str, column: str, title: str) -> Figure:
    series, rows = [], []
    for i, summary in enumerate(summaries):
        values = np.sort(_good(summary, column)[column].to_numpy(dtype=np.float64))
        if not len(values):
            continue
        series.append(Series(summary.title, thinned(values).tolist(), (), color=i))
        rows.append([summary.title, f"{len(values):,}", *(show_number(float(np.quantile(values, share))) for share in SHARES)])
    grid = Grid(f"{name} ms at or below which a share of requests lies", ["Run", "n", *(f"{share:.0%}" for share in SHARES)], rows)
    svg = distribution_chart(title, series, f"{name} (ms, logarithmic)")
    return Figure(title, f"{name} of every good request: how many were at or below each value.", svg, grid, _legend(summaries))


def hit_rate_by_turn(summaries: list[Summary]) -> Figure:
    groups = max((s.groups("turn") for s in summaries), key=len, default=[])
    return _rates(
        summaries,
        groups,
        "turn",
        1,
        "hit_rate_client",
        "Share of prompt tokens that came from the prefix cache, by turn of the conversation.",
    )


def hit_rate_by_rank(summaries: list[Summary]) -> Figure:
    groups = max((s.groups("rank") for s in summaries), key=len, default=[])
    return _rates(
        summaries,
        groups,
        "rank",
        0,
        "hit_rate_server",
        "Share of looked-up tokens that the prefix cache held, by the counters of each rank.",
    )


def _rates(summaries: list[Summary], groups: list[str], kind: str, first: int, metric: str, caption: str) -> Figure:
    names = [f"{kind} {int(group.split()[1]) + first}" for group in groups]
    series, rows = [], []
    for i, summary in enumerate(summaries):
        values = [summary.value(metric, group=group) for group in groups]
        series.append(Series(summary.title, (), [math.nan if v is None else v for v in values], color=i))
        rows.append([summary.title, *(show_share(v) for v in values)])
    title = f"Hit rate by {kind}"
    return Figure(
        title, caption, bar_chart(title, names, series, "hit rate", percent=True), Grid(title, ["Run", *names], rows), _legend(summaries)
    )


def ttft_parts(summaries: list[Summary]) -> Figure:
    """Mean TTFT by turn, each bar made of what the server said about it. Of one run: bars of several would hide each other."""
    summary = summaries[0]
    groups = [group for group in ["all", *summary.groups("turn")] if summary.value("ttft_prefill", "mean", group) is not None][:13]
    title = "Where the time to first token went"
    names = ["all" if group == "all" else f"turn {int(group.split()[1]) + 1}" for group in groups]
    series, rows = [], []
    for color, (metric, _, name, what) in enumerate(PARTS):
        values = [summary.value(metric, "mean", group) or 0.0 for group in groups]
        series.append(Series(f"{name} ({what})", (), values, color=color))
        rows.append([name, *(show_number(value) for value in values)])
    caption = "Mean TTFT of good requests, split by the server's own account; what remains is the way to the client."
    caption += f" Of {summary.title}." if len(summaries) > 1 else ""
    legend = [(color, s.name) for color, s in enumerate(series)]
    return Figure(title, caption, stacked_chart(title, names, series, "mean TTFT (ms)"), Grid(title, ["ms", *names], rows), legend)


def ttft_by_work(summaries: list[Summary]) -> Figure:
    """TTFT against the tokens that had to be computed."""
    series, rows = [], []
    for i, summary in enumerate(summaries):
        good = _good(summary, "ttft_ms", "prompt_tokens", also=("cached_tokens", "turn"))
        if good.empty:
            continue
        cached = good["cached_tokens"].fillna(0).to_numpy(dtype=np.float64)
        work = good["prompt_tokens"].to_numpy(dtype=np.float64) - cached
        ttft, turn = good["ttft_ms"].to_numpy(dtype=np.float64), good["turn"].to_numpy(dtype=np.int64)
        keep = spread(len(work))
        texts = [f"turn {turn[k] + 1}: {work[k]:,.0f} tokens computed, {cached[k]:,.0f} cached, {ttft[k]:,.1f} ms" for k in keep]
        series.append(Series(summary.title, work[keep].tolist(), ttft[keep].tolist(), texts, i))
        rows += _by_work(summary.title, work, ttft)
    title = "TTFT against tokens computed"
    caption = "Each dot is a request: prompt tokens that were not in the cache, and the time until its first token."
    svg = scatter_chart(title, series, "prompt tokens computed", "TTFT (ms)")
    grid = Grid(title, ["Run", "Tokens computed", "n", "TTFT mean ms"], rows, left=frozenset({0, 1}))
    return Figure(title, caption, svg, grid, _legend(summaries))


def _by_work(name: str, work: Array, ttft: Array) -> list[list[str | None]]:
    """Powers of four, from 64 tokens up."""
    rows: list[list[str | None]] = []
    edges = [0.0] + [64.0 * 4**k for k in range(9)] + [math.inf]
    for low, high in itertools.pairwise(edges):
        inside = (work >= low) & (work < high)
        if inside.any():
            text = f"{low:,.0f} to {high:,.0f}" if math.isfinite(high) else f"{low:,.0f} and more"
            rows.append([name, text, f"{int(inside.sum()):,}", show_number(float(ttft[inside].mean()))])
    return rows


def timeline(summary: Summary, named: bool) -> Figure:
    """What happened when: requests in flight, tokens per second, hit rate and TTFT on one time axis; failures as ticks."""
    requests = summary.requests
    if requests.empty:
        return Figure("", "", "", Grid("", [], []), [])
    zero_s = float(requests["start_s"].min())
    end_s = float(requests["end_s"].max()) - zero_s
    strips = [Strip("requests in flight", in_flight(requests, zero_s), "steps"), *_rate_strips(summary.timeline, zero_s)]
    good = _good(summary, "ttft_ms", also=("start_s", "turn"))
    good = good.iloc[spread(len(good))]
    texts = [f"turn {turn + 1}: {ttft:,.1f} ms" for turn, ttft in zip(good["turn"], good["ttft_ms"], strict=True)]
    strips.append(Strip("TTFT (ms)", Series("TTFT", (good["start_s"] - zero_s).tolist(), good["ttft_ms"].tolist(), texts, 1), "dots"))
    bad = requests.loc[~requests["ok"], ["end_s", "outcome", "error_text"]].dropna(subset=["end_s"]).iloc[:MOST_MARKS]
    marks = [
        (float(at) - zero_s, f"{kind}: {text}") for at, kind, text in zip(bad["end_s"], bad["outcome"], bad["error_text"], strict=True)
    ]
    title = f"Time line of {summary.title}" if named else "Time line"
    caption = "Requests in flight, output tokens per second, hit rate and TTFT over the run; failed requests are vertical ticks."
    return Figure(title, caption, timeline_chart(title, strips, end_s, marks), _time_grid(requests, zero_s, end_s), [], wide=True)


def in_flight(requests: pd.DataFrame, zero_s: float) -> Series:
    """+1 at each start, -1 at each end; of a long run the highest of each short stretch."""
    starts, ends = (requests[name].dropna().to_numpy(dtype=np.float64) - zero_s for name in ("start_s", "end_s"))
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    times, count = times[order], np.cumsum(np.repeat([1.0, -1.0], [len(starts), len(ends)])[order])
    if len(times) > MOST_POINTS:
        first = np.linspace(0, len(times), MOST_POINTS, endpoint=False).astype(np.int64)
        times, count = times[first], np.maximum.reduceat(count, first)
    return Series("in flight", times.tolist(), count.tolist(), color=0)


def _rate_strips(timeline: pd.DataFrame, zero_s: float) -> list[Strip]:
    """Growth of the server's counters between samples, all ranks together."""
    if timeline.empty:
        return []
    sums = timeline.groupby("at_s")[["generated_total", "lookup_tokens_total", "hit_tokens_total"]].sum()
    at_s = sums.index.to_numpy(dtype=np.float64)
    if len(at_s) < 2:
        return []
    middle = ((at_s[1:] + at_s[:-1]) / 2 - zero_s).clip(min=0.0)
    # A restarted rank counts from zero: a negative step is no rate.
    steps = {name: np.diff(sums[name].to_numpy(dtype=np.float64)).clip(min=0.0) for name in sums.columns}
    out = [Strip("output tok/s", Series("tok/s", middle.tolist(), (steps["generated_total"] / np.diff(at_s)).tolist(), color=2))]
    looked = steps["lookup_tokens_total"] > 0
    if looked.any():
        rates = steps["hit_tokens_total"][looked] / steps["lookup_tokens_total"][looked] * 100
        out.append(Strip("hit rate (%)", Series("hit rate", middle[looked].tolist(), rates.tolist(), color=3)))
    return out


def _time_grid(requests: pd.DataFrame, zero_s: float, end_s: float) -> Grid:
    """Ten equal parts of the run."""
    width = end_s / 10 or 1.0
    ended = requests[["end_s", "ok", "ttft_ms", "output_tokens"]].dropna(subset=["end_s"])
    part = np.ceil((ended["end_s"].to_numpy(dtype=np.float64) - zero_s) / width - 1e-9).clip(1, 10).astype(np.int64) - 1
    good = ended["ok"].to_numpy(dtype=bool)
    rows: list[list[str | None]] = []
    for i in range(10):
        here, failed = ended[(part == i) & good], int(((part == i) & ~good).sum())
        ttft = show_number(float(here["ttft_ms"].mean())) if len(here) else None
        tokens = show_number(float(here["output_tokens"].sum()) / width)
        rows.append([f"{i * width:.1f} to {(i + 1) * width:.1f}", str(len(here)), str(failed), tokens, ttft])
    return Grid("By time", ["Seconds", "Ended ok", "Failed", "Output tok/s", "TTFT mean ms"], rows)


def frontier(summaries: list[Summary]) -> Figure:
    """Throughput against what one user sees."""
    series, rows = [], []
    for i, summary in enumerate(summaries):
        user, output = summary.value("user_rate"), summary.value("output_rate")
        if user is None or output is None:
            continue
        series.append(
            Series(summary.title, [user], [output], [f"{summary.title}: {output:,.1f} tok/s in total, {user:,.1f} for one user"], i)
        )
        rows.append([summary.title, show_number(user), show_number(output)])
    title = "Throughput against interactivity"
    caption = "Up: more tokens per second from the server. Right: faster answers for one user."
    svg = scatter_chart(title, series, "tok/s per user (median)", "output tok/s")
    return Figure(title, caption, svg, Grid(title, ["Run", "tok/s per user", "Output tok/s"], rows), _legend(summaries))
