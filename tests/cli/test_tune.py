"""Tuning: the choice among intervals, the file it is written to, and the whole command against a live server."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.bench import harness
from deepinfer_cli.bench.recipe import load_recipe
from deepinfer_cli.tune.choice import choose
from deepinfer_cli.tune.measure import Measurement, NotMeasurable, Sample, check_load
from deepinfer_cli.tune.write import with_value, write_value
from tests.cli.fake_server import serving

COUNTERS_AGE_S = harness.COUNTERS_AGE_S  # as it is outside tests
Dix = Callable[..., Any]


def measured(value: int, ttft_ms: list[float], itl_ms: list[float]) -> Measurement:
    runs = [Sample(ttft_p90_ms=t, itl_p99_ms=i, output_tok_s=1e4 / t) for t, i in zip(ttft_ms, itl_ms, strict=True)]
    return Measurement(value, runs)


FAST = measured(1, [100, 101, 99], [80, 82, 81])
MIDDLE = measured(2, [120, 121, 119], [40, 41, 42])
SLOW = measured(100, [300, 290, 310], [20, 21, 20])


def test_the_fastest_interval_wins_when_there_is_no_limit() -> None:
    choice = choose([FAST, MIDDLE, SLOW], default=2)
    assert choice.value == 1
    assert choice.verdicts == ["chosen", "slower", "slower"]


def test_a_limit_on_itl_rules_out_the_fastest() -> None:
    choice = choose([FAST, MIDDLE, SLOW], itl_p99_ms=60, default=2)
    assert choice.value == 2
    assert choice.verdicts[0] == "over the ITL limit"


def test_the_upper_end_of_the_interval_must_keep_the_limit() -> None:
    shaky = measured(2, [120, 121, 119], [30, 58, 44])  # the mean keeps 60 ms, its interval does not
    assert choose([shaky, SLOW], itl_p99_ms=60).value == 100


def test_no_interval_at_all_is_said() -> None:
    choice = choose([FAST, MIDDLE], itl_p99_ms=10)
    assert choice.value is None
    assert "10.0 ms" in choice.reason


def test_what_cannot_be_told_apart_goes_to_the_default() -> None:
    noisy = measured(8, [118, 124, 112], [40, 41, 42])
    choice = choose([MIDDLE, noisy, SLOW], default=2)
    assert choice.value == 2
    assert "cannot tell it from 8" in choice.reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[server]\nport = 1\n",
        "# mine\n[engine]\nmax_num_seqs = 4\n\n[server]\nport = 1\n",
        "[engine]\nprefill_any_interval = 100\nmax_num_seqs = 4\n",
    ],
)
def test_writing_changes_one_value_and_nothing_else(text: str) -> None:
    before = tomllib.loads(text)
    out = with_value(text, "engine", "prefill_any_interval", 7, "tuned")
    after = tomllib.loads(out)
    assert after["engine"].pop("prefill_any_interval") == 7
    before.get("engine", {}).pop("prefill_any_interval", None)
    assert {k: v for k, v in after.items() if v} == {k: v for k, v in before.items() if v}
    assert "# mine" in out or "# mine" not in text


def test_a_file_that_is_not_there_is_made(tmp_path: Path) -> None:
    write_value(tmp_path / "dix.toml", "engine", "prefill_any_interval", 3, "tuned")
    assert tomllib.loads((tmp_path / "dix.toml").read_text()) == {"engine": {"prefill_any_interval": 3}}


def test_loads_that_the_simulator_cannot_follow_are_refused() -> None:
    check_load(load_recipe("prefill-interval"))
    with pytest.raises(NotMeasurable, match="smoke"):
        check_load(load_recipe("smoke"))


def test_a_limit_needs_a_load_to_measure_it_under(dix: Dix) -> None:
    assert dix("tune", "prefill-interval", "--url", "http://127.0.0.1:9", "--load", "none", "--itl-p99", "50ms").code == 2


def test_a_foreign_server_cannot_be_tuned(dix: Dix) -> None:
    with serving(ours=False) as server:
        ran = dix("tune", "prefill-interval", "--url", server.url)
    assert ran.code == 5
    assert "/deepinfer/scheduling" in ran.err


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lone_request_waits_as_long_as_simulated(dix: Dix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of the embedded model: about 100 decode steps at interval 100, at most two at 2, and the simulator within 10 %."""
    monkeypatch.setattr(harness, "COUNTERS_AGE_S", COUNTERS_AGE_S)
    started = dix("start", "tiny", "--name", "tuned", "--dp", "2", "--port", "0", "--json")
    assert started.code == 0, started.err
    try:
        url = json.loads(started.out.splitlines()[-1])["url"]
        command = ["--values", "2,100", "--repeats", "1", "--load", "none", "--html", tmp_path / "tune.html", "--json"]
        ran = dix("tune", "prefill-interval", "--url", url, *command)
        assert ran.code == 0, ran.err
        document = json.loads(ran.out.splitlines()[-1])
        refused = dix("tune", "prefill-interval", "--url", url, "--write")
    finally:
        dix("stop", "tuned")
    short, long = document["values"]
    assert short["mean"]["wait_steps"] <= 2
    assert long["mean"]["wait_steps"] == pytest.approx(100, rel=0.1)
    assert abs(long["difference"]["wait_steps"]) <= 0.1
    assert document["step_costs"]["vote_s"] > 0
    assert (tmp_path / "tune.html").stat().st_size > 5_000
    assert refused.code == 2
