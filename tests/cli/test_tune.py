"""Tuning: the choice among intervals, the file it is written to, and the whole command against a live server."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from deepinfer_cli.bench import harness
from deepinfer_cli.bench.recipe import load_recipe
from deepinfer_cli.tune import measure
from deepinfer_cli.tune.choice import choose
from deepinfer_cli.tune.measure import Measurement, NotMeasurable, Sample, check_load
from deepinfer_cli.tune.simulator import SimulatedGroup, StepCosts, Workload, simulate
from deepinfer_cli.tune.write import with_value, write_value
from engine.prefill_gate import VoteRule
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


def test_the_count_of_decode_steps_begins_anew_right_before_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the preflight's answer decoded would shorten the first request's wait."""
    happened: list[Any] = []

    class Server:
        url, model = "http://server", lambda self: "m"
        get = lambda self, path: {measure.KEY: 7, "prefill_vote": "intervals"}  # noqa: E731
        post = lambda self, path, body: happened.append(body[measure.KEY])  # noqa: E731
        chat = lambda self, body: happened.append(f"chat of {body['max_tokens']}")  # noqa: E731

    class Run:
        folder = tmp_path

        def __init__(self, *_: Any) -> None: ...

        def execute(self) -> tuple[Any, int]:
            happened.append("run")
            return SimpleNamespace(valid=True), 0

    monkeypatch.setattr(measure, "preflight", lambda api, recipe: happened.append("preflight") or SimpleNamespace(model="m"))
    monkeypatch.setattr(measure, "Run", Run)
    monkeypatch.setattr(measure, "summarize", lambda folder: None)
    bench = measure.Bench(cast(Any, SimpleNamespace(ui=None)), cast(Any, Server()), "", lambda text: None)
    bench.run(load_recipe("prefill-interval"), 2, "lone")
    assert happened == [2, "preflight", "chat of 1", "run"]


@pytest.mark.parametrize("value", [1, 2, 100])
def test_the_simulator_gives_back_the_account_that_its_costs_were_taken_from(value: int) -> None:
    """An engine with known times: what it would say of lone requests is what the simulator then says."""
    vote_ms, wake_ms, work_ms, outside_ms = 4.0, 3.0, 10.0, 2.0

    def queue_ms(steps: int) -> float:
        return wake_ms + (steps + 1) * vote_ms  # the last vote admits the prompt

    prefill_ms = vote_ms + work_ms  # the second vote comes behind the admission
    account = {"prompt_tokens": 32.0, "server_queue_ms": queue_ms(value), "restore_ms": 0.0, "prefill_ms": prefill_ms}
    lone = pd.DataFrame([{**account, "ttft_ms": queue_ms(value) + prefill_ms + outside_ms}])
    vote_s, wake_s = measure.votes_of([(steps, queue_ms(steps) / 1e3) for steps in (1, 500)])
    costs = measure.refined(StepCosts(vote_s, 0.02, 0.0, 0.5, 0.0, wake_s), lone, 512)
    work = Workload(prompt_tokens=32, output_tokens=1, count=3, think_s=0.1)
    simulated = simulate(work, SimulatedGroup(ranks=4, attempt=70, any_=value, costs=costs))
    sample = measure.simulated_sample(simulated, [], costs, costs)
    assert sample.wait_steps == value
    assert sample.queue_ms == pytest.approx(queue_ms(value))
    assert sample.lone_ttft_ms == pytest.approx(queue_ms(value) + prefill_ms + outside_ms)


def test_costs_of_prompts_in_several_chunks_are_told_apart() -> None:
    prompt_s, token_s, vote_s = 0.020, 0.0001, 0.003

    def prefill(tokens: int) -> tuple[int, float]:
        chunks = measure.num_chunks(tokens, 512)
        return tokens, chunks * prompt_s + tokens * token_s + (2 * chunks - 1) * vote_s

    found = measure.prompt_costs([prefill(32), prefill(2000)], vote_s, 512)
    assert found == pytest.approx((prompt_s, token_s))
    lone = pd.DataFrame([{"prompt_tokens": 2000.0, "server_queue_ms": 0.0, "restore_ms": 0.0, "prefill_ms": prefill(2000)[1] * 1e3}])
    costs = measure.refined(StepCosts(vote_s, 0.02, 0.0, *found), lone.assign(ttft_ms=lone["prefill_ms"]), 512)
    assert (costs.prompt_s, costs.prompt_token_s) == pytest.approx((prompt_s, token_s))
    full = measure.prompt_costs([prefill(512), prefill(1024)], vote_s, 512)  # nothing tells steps and tokens apart
    assert full == pytest.approx((0.0, token_s + prompt_s / 512))


@pytest.mark.parametrize(
    ("said", "reason"),
    [({}, "does not say what decides"), ({"prefill_vote": "urgent"}, "no interval decides")],
)
def test_a_server_on_which_intervals_decide_nothing_is_refused(said: dict[str, str], reason: str) -> None:
    api = SimpleNamespace(url="http://server", get=lambda path: {measure.KEY: 2, **said})
    with pytest.raises(NotMeasurable, match=reason):
        measure.Bench(cast("Any", None), cast(Any, api), "", lambda text: None)


def test_chunks_that_each_wait_are_not_calibrated() -> None:
    bench = SimpleNamespace(rule=VoteRule.REFERENCE, chunk_tokens=512)
    with pytest.raises(NotMeasurable, match="every chunk waits"):
        measure.calibrate(cast(Any, bench), load_recipe("prefill-interval"), 400)


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
    assert abs(short["difference"]["wait_steps"]) <= 0.1
    assert abs(long["difference"]["wait_steps"]) <= 0.1
    assert document["step_costs"]["vote_s"] > 0
    assert (tmp_path / "tune.html").stat().st_size > 5_000
    assert refused.code == 2
