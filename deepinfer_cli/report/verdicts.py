"""Comparisons and repeated runs as tables."""

from __future__ import annotations

from deepinfer_cli.report.compare import MEASURES, Comparison, Result
from deepinfer_cli.report.intervals import mean_interval
from deepinfer_cli.report.stats import Summary
from deepinfer_cli.report.tables import Grid
from deepinfer_cli.units import show_number


def comparison_grid(result: Result) -> Grid:
    """base, new, change, interval and verdict of every compared number."""
    rows: list[list[str | None]] = [
        [c.label, show_number(c.base, c.digits), show_number(c.new, c.digits), _percent(c.change), _interval(c), c.verdict.value]
        for c in result.lines
    ]
    title = "Comparison within single runs" if any(line.within_one_run for line in result.lines) else "Comparison"
    return Grid(title, ["", "base", "new", "change", f"{result.confidence * 100:g} % interval", "verdict"], rows, left=frozenset({0, 5}))


def repeats_grid(summaries: list[Summary], confidence: float = 0.95) -> Grid:
    """Repeated runs of the same work: the mean of per-run values with its interval, and the runs' range."""
    rows: list[list[str | None]] = []
    for m in MEASURES:
        values = [v for s in summaries if s.run.get("valid") and (v := s.value(m.metric, m.stat)) is not None]
        if not values:
            continue
        interval = mean_interval(values, confidence)
        middle = interval.value if interval is not None else sum(values) / len(values)
        ends = f"[{show_number(interval.low, m.digits)}, {show_number(interval.high, m.digits)}]" if interval is not None else None
        rows.append(
            [
                m.label,
                str(len(values)),
                show_number(middle, m.digits),
                ends,
                show_number(min(values), m.digits),
                show_number(max(values), m.digits),
            ]
        )
    note = f"{confidence:.0%} interval of the mean between runs; requests of one run are not independent. Invalid runs are left out."
    return Grid("Between runs", ["", "runs", "mean", "interval", "least", "most"], rows, note=note)


def _percent(share: float) -> str:
    return f"{share * 100:+.1f} %".replace("-", "−")


def _interval(line: Comparison) -> str | None:
    if line.interval is None:
        return None
    return f"[{line.interval.low * 100:+.1f}, {line.interval.high * 100:+.1f}] %".replace("-", "−")
