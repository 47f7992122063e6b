"""Intervals against tables of Student's t, verdicts by the rule, and honest answers when nothing can be told."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_cli.report.compare import Verdict, judge
from deepinfer_cli.report.intervals import Interval, bootstrap_ratio, mean_interval, t_quantile, welch_ratio
from tests.cli.test_report import STAMP, four_requests, make_run, record

Dix = Callable[..., Any]


@pytest.mark.parametrize(
    ("p", "df", "t"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.77645), (0.975, 8, 2.30600), (0.95, 10, 1.81246), (0.995, 30, 2.75000), (0.975, 1e6, 1.95997)],
)
def test_t_quantiles_are_those_of_the_printed_table(p: float, df: float, t: float) -> None:
    assert t_quantile(p, df) == pytest.approx(t, rel=1e-5)


def test_mean_interval_by_hand() -> None:
    # logs 0, 1, 2: mean 1, deviation 1, half width 4.30265 / sqrt(3)
    found = mean_interval([1.0, math.e, math.e**2], 0.95)
    assert found is not None
    half = 4.30265 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((math.e, math.exp(1 - half), math.exp(1 + half)), rel=1e-5)


def test_welch_by_hand() -> None:
    # logs (0, 2) and (1, 3): change 1, both variances 2/2 = 1, so the error is sqrt(2) with 2 degrees of freedom
    found = welch_ratio([1.0, math.e**2], [math.e, math.e**3], 0.95)
    assert found is not None
    half = 4.30265 * math.sqrt(2)
    assert (found.value, found.low, found.high) == pytest.approx((math.expm1(1), math.expm1(1 - half), math.expm1(1 + half)), rel=1e-5)


def test_one_run_gives_no_interval_between_runs() -> None:
    assert welch_ratio([1.0], [1.0, 2.0], 0.95) is None
    assert mean_interval([1.0], 0.95) is None


@pytest.mark.parametrize(
    ("low", "high", "higher_is_better", "verdict"),
    [
        (-0.112, -0.061, False, Verdict.BETTER),
        (-0.098, 0.051, False, Verdict.UNKNOWN),
        (0.041, 0.069, True, Verdict.BETTER),
        (0.041, 0.069, False, Verdict.WORSE),
        (-0.010, 0.015, False, Verdict.SAME),
        (0.005, 0.015, False, Verdict.SAME),
        (-0.010, 0.030, False, Verdict.UNKNOWN),
    ],
)
def test_verdicts(low: float, high: float, higher_is_better: bool, verdict: Verdict) -> None:
    interval = Interval((low + high) / 2, low, high)
    assert judge(interval, interval, 0.02, higher_is_better) is verdict


def test_without_an_interval_nothing_can_be_told() -> None:
    assert judge(None, None, 0.02, True) is Verdict.UNKNOWN


def test_bootstrap_covers_a_known_ratio() -> None:
    rng = np.random.default_rng(1)
    base = [rng.normal(100, 5, 50) for _ in range(8)]
    new = [rng.normal(110, 5, 50) for _ in range(8)]
    found = bootstrap_ratio(base, new, lambda v: float(np.mean(v)), 0.95)
    assert found is not None
    assert found.low < 0.10 < found.high
    assert found.high - found.low < 0.05


def test_same_against_same_is_rarely_called_different() -> None:
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(200):
        a, b = (list(rng.lognormal(4, 0.05, 5)) for _ in range(2))
        interval = welch_ratio(a, b, 0.95)
        wrong += judge(interval, interval, 0.02, False) in (Verdict.BETTER, Verdict.WORSE)
    assert wrong <= 20


def runs(home: Path, kind: str, ttfts: list[float], **options: Any) -> None:
    second = 0 if kind == "base" else 30
    for i, ttft in enumerate(ttfts):
        records = [record(c, 0, 0.1 * c, ttft * (1 + 0.01 * (c % 3))) for c in range(25)]
        make_run(home, f"20260101-0000{second + i:02d}-smoke-{kind}-{i:06x}", records, labels={"build": kind}, **options)


def test_a_regression_past_the_limit_exits_1(dix: Dix, home: Path) -> None:
    runs(home, "base", [0.100, 0.101, 0.099])
    runs(home, "new", [0.120, 0.121, 0.119])
    ran = dix("report", "new", "--baseline", "base", "--fail-over", "3%", "--json")
    assert ran.code == 1
    ttft = next(line for line in ran.json["comparison"] if line["label"] == "TTFT mean ms")
    assert ttft["verdict"] == "worse"
    assert ttft["change"] == pytest.approx(0.20, abs=0.002)
    assert dix("report", "new", "--baseline", "base", "--fail-over", "40%").code == 0
    assert dix("report", "base", "--baseline", "new", "--fail-over", "3%").code == 0


def test_the_table_says_what_changed(dix: Dix, home: Path) -> None:
    runs(home, "base", [0.100, 0.101, 0.099])
    runs(home, "new", [0.120, 0.121, 0.119])
    out = dix("report", "new", "--baseline", "base", "--metric", "ttft mean").out
    assert "+20.0 %" in out
    assert "worse" in out
    assert "TPOT" not in out


def test_one_run_each_is_labelled(dix: Dix, home: Path) -> None:
    runs(home, "base", [0.100])
    runs(home, "new", [0.100])
    ran = dix("report", "new", "--baseline", "base")
    assert ran.code == 0
    assert "Comparison within single runs" in ran.out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_comparison_says_everything_at_any_width(dix: Dix, home: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    runs(home, "base", [0.100, 0.101, 0.099])
    runs(home, "new", [0.120, 0.121, 0.119])
    monkeypatch.setenv("COLUMNS", "500")
    wide = dix("report", "new", "--baseline", "base").out
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = dix("report", "new", "--baseline", "base").out
    assert all(len(line) <= width for line in narrow.splitlines() if line != STAMP)
    assert "95 % interval" in narrow
    assert sorted(set(narrow.split())) == sorted(set(wide.split())), "every word and number, at any width"


def test_the_head_of_the_intervals_is_the_confidence_that_was_asked_for(dix: Dix, home: Path) -> None:
    runs(home, "base", [0.100, 0.101, 0.099])
    runs(home, "new", [0.120, 0.121, 0.119])
    out = dix("report", "new", "--baseline", "base", "--confidence", "0.9").out
    assert "90 % interval" in out
    assert "95 %" not in out


def test_different_work_is_refused_unless_forced(dix: Dix, home: Path) -> None:
    make_run(home, "20260101-000000-smoke-aaaaaa", four_requests())
    make_run(home, "20260101-000001-smoke-bbbbbb", four_requests(), recipe_hash="other")
    ran = dix("report", "bbbbbb", "--baseline", "aaaaaa")
    assert ran.code == 5
    assert "differ in recipe" in ran.err
    forced = dix("report", "bbbbbb", "--baseline", "aaaaaa", "--force")
    assert forced.code == 0
    assert "forced comparison of different recipe" in forced.out


def test_invalid_runs_never_enter_a_comparison(dix: Dix, home: Path) -> None:
    make_run(home, "20260101-000000-smoke-aaaaaa", four_requests())
    make_run(home, "20260101-000001-smoke-bbbbbb", four_requests(), valid=False)
    ran = dix("report", "bbbbbb", "--baseline", "aaaaaa")
    assert ran.code == 5
    assert "no valid run" in ran.err
