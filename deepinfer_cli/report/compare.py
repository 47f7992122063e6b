"""Two groups of runs side by side: change, interval, verdict. The run is the sample: requests of one run share a queue and a cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from deepinfer_cli.report.intervals import Array, Interval, bootstrap_ratio, welch_ratio
from deepinfer_cli.report.stats import Summary
from hicache.errors import DixError

BLOCK_S = 60.0
LEAST_BLOCKS = 5


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNKNOWN = "cannot tell"


class NotComparable(DixError):
    """Runs of different work: their difference says nothing about the server."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class Measure:
    """A compared number. `column`: the requests column behind it, for intervals within one run."""

    label: str
    metric: str
    stat: str
    higher_is_better: bool
    column: str = ""
    digits: int = 1

    @property
    def question(self) -> tuple[str, bool]:
        """Numbers of one question move together: the middle of a latency is one, its tail another."""
        return self.metric, self.stat in ("p90", "p95", "p99")

    def statistic(self) -> Callable[[Array], float]:
        if self.stat == "mean":
            return lambda values: float(np.mean(values))
        return lambda values: float(np.percentile(values, float(self.stat[1:])))


MEASURES = (
    Measure("TTFT mean ms", "ttft", "mean", False, "ttft_ms"),
    Measure("TTFT p50 ms", "ttft", "p50", False, "ttft_ms"),
    Measure("TTFT p90 ms", "ttft", "p90", False, "ttft_ms"),
    Measure("TTFT p99 ms", "ttft", "p99", False, "ttft_ms"),
    Measure("TPOT mean ms", "tpot", "mean", False, "tpot_ms"),
    Measure("TPOT p50 ms", "tpot", "p50", False, "tpot_ms"),
    Measure("TPOT p99 ms", "tpot", "p99", False, "tpot_ms"),
    Measure("End to end mean ms", "e2e", "mean", False, "e2e_ms"),
    Measure("Output tok/s", "output_rate", "value", True),
    Measure("Hit rate", "hit_rate_client", "value", True, digits=3),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line. Changes are shares of the base value."""

    label: str
    base: float
    new: float
    change: float
    interval: Interval | None
    verdict: Verdict
    within_one_run: bool
    digits: int = 1

    @property
    def regression(self) -> float:
        """The least harm that the interval allows: positive only when the whole interval is on the bad side."""
        if self.interval is None or self.verdict is not Verdict.WORSE:
            return 0.0
        return min(abs(self.interval.low), abs(self.interval.high))


@dataclass(frozen=True, slots=True)
class Result:
    """Everything a comparison says."""

    lines: list[Comparison]
    notes: list[str] = field(default_factory=list)
    banner: str = ""
    confidence: float = 0.95


def compare(
    base: list[Summary], new: list[Summary], *, confidence: float = 0.95, margin: float = 0.02, metric: str = "", force: bool = False
) -> Result:
    """Compare valid runs. Raises: NotComparable for different work, or when a side has no valid run."""
    differences = different_work(base, new)
    if differences and not force:
        raise NotComparable(f"the runs differ in {', '.join(differences)}", hint="compare runs of one recipe and model, or --force")
    base, new, notes = _valid(base, "base"), _valid(new, "new"), []
    notes += differing_settings(base[0], new[0])
    wanted = [m for m in MEASURES if metric.lower() in m.label.lower() and _values(m, base) and _values(m, new)]
    rule = Rule(confidence, margin, len({m.question for m in wanted}))
    lines = [line for m in wanted if (line := _compare(m, base, new, rule)) is not None]
    if len(lines) > 1:
        notes.append(f"better and worse hold for all lines together with {confidence:.0%} confidence (Bonferroni over {rule.questions})")
    if any(line.within_one_run for line in lines):
        notes.append("one run on a side: intervals hold within these runs only; repeat with --repeats 5 on both sides")
    return Result(lines, notes, f"forced comparison of different {', '.join(differences)}" if differences else "", confidence)


@dataclass(frozen=True, slots=True)
class Rule:
    """How verdicts are reached. questions: asked at once; each gets its part of the risk of a false claim."""

    confidence: float
    margin: float
    questions: int

    @property
    def strict(self) -> float:
        """Confidence of one claim when no claim at all may be wrong."""
        return 1 - (1 - self.confidence) / max(1, self.questions)


def _values(measure: Measure, side: list[Summary]) -> list[float]:
    return [value for summary in side if (value := summary.value(measure.metric, measure.stat)) is not None]


def _valid(side: list[Summary], name: str) -> list[Summary]:
    good = [summary for summary in side if summary.run.get("valid")]
    if not good:
        raise NotComparable(f"the {name} side has no valid run", hint="dix report RUN shows why; invalid runs never enter a comparison")
    return good


def different_work(base: list[Summary], new: list[Summary]) -> list[str]:
    """What makes the work different: recipe, model, harness."""

    def facts(summary: Summary) -> dict[str, Any]:
        run = summary.run
        return {"recipe": run.get("recipe_hash"), "model": run.get("server", {}).get("model"), "harness": run.get("harness")}

    seen = [facts(summary) for summary in base + new]
    return [key for key in seen[0] if any(other[key] != seen[0][key] for other in seen)]


def differing_settings(base: Summary, new: Summary) -> list[str]:
    """Differences in what the server and the environment were, one note each."""
    out = []
    for key in ("ranks", "url"):
        a, b = base.run.get("server", {}).get(key), new.run.get("server", {}).get(key)
        if a != b and key == "ranks":
            out.append(f"{key} differs ({a} → {b})")
    if (a := base.run.get("labels") or {}) != (b := new.run.get("labels") or {}):
        out.append(f"labels: {_pairs(a)} → {_pairs(b)}")
    return out


def _pairs(labels: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items()) or "none"


def _compare(measure: Measure, base: list[Summary], new: list[Summary], rule: Rule) -> Comparison | None:
    a, b = _values(measure, base), _values(measure, new)
    if not a or not b or min(a) <= 0:
        return None
    old, now = math.exp(float(np.mean(np.log(a)))), float(np.exp(np.mean(np.log(b)))) if min(b) > 0 else float(np.mean(b))
    shown, strict = (welch_ratio(a, b, confidence) for confidence in (rule.confidence, rule.strict))
    within = shown is None and len(a) == len(b) == 1 and bool(measure.column)
    if within:
        blocks = [_blocks(side[0], measure.column) for side in (base, new)]
        statistic = measure.statistic()
        shown, strict = (bootstrap_ratio(blocks[0], blocks[1], statistic, confidence) for confidence in (rule.confidence, rule.strict))
    change = shown.value if shown is not None else now / old - 1
    verdict = judge(shown, strict, rule.margin, measure.higher_is_better)
    return Comparison(measure.label, old, now, change, shown, verdict, within, measure.digits)


def judge(shown: Interval | None, strict: Interval | None, margin: float, higher_is_better: bool) -> Verdict:
    """same: the whole interval inside ±margin. better or worse: the whole strict interval on one side of zero."""
    if shown is None or strict is None:
        return Verdict.UNKNOWN
    if -margin <= shown.low and shown.high <= margin:
        return Verdict.SAME
    if strict.low > 0:
        return Verdict.BETTER if higher_is_better else Verdict.WORSE
    if strict.high < 0:
        return Verdict.WORSE if higher_is_better else Verdict.BETTER
    return Verdict.UNKNOWN


def _blocks(summary: Summary, column: str) -> list[Array]:
    """Values of one run in windows of 60 s; of a shorter run, in five windows."""
    good = summary.good[summary.good[column].notna()]
    if good.empty:
        return []
    start_s = good["start_s"].to_numpy(dtype=np.float64)
    span_s = float(start_s.max() - start_s.min())
    width_s = min(BLOCK_S, span_s / LEAST_BLOCKS) or 1.0
    index = ((start_s - start_s.min()) / width_s).astype(int)
    values = good[column].to_numpy(dtype=np.float64)
    return [values[index == i] for i in range(int(index.max()) + 1)]


def worst_regression(result: Result) -> float:
    return max((line.regression for line in result.lines), default=0.0)
