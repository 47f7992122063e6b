"""The offline sweep: what is measured, what is refused, and the frontier of its points."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_cli.bench.engine_sweep import Bench, Point, pareto
from deepinfer_cli.bench.null_model import NullRunner
from deepinfer_cli.commands.bench_engine import settled_path
from engine import native_start
from engine.config import EngineConfig
from engine.engine import Engine
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError

Dix = Callable[..., Any]


def engine(max_num_seqs: int = 8) -> Engine:
    runner: Any = NullRunner(max_num_seqs)
    return Engine(EngineConfig(spec=False), HiCacheConfig(size_gb=0), runner=runner)


def test_a_prefill_point_times_every_prompt_and_leaves_nothing_behind() -> None:
    built = engine()
    point = Bench(built).prefill(20_000, 3)  # three chunks of 8,192 tokens
    assert len(point.time_us) == 3
    assert built.stats()["prompt_steps_total"] == 9
    assert point.tok_s == pytest.approx(20_000 / point.median_us * 1e6)
    assert not built.scheduler.has_work


def test_a_decode_point_keeps_its_batch_whole() -> None:
    built = engine()
    point = Bench(built).decode(8, 8000, 10)  # eight prompt steps, decode steps among them
    assert len(point.time_us) == 10
    assert point.tokens_per_step == 1.0
    assert point.user_tok_s is not None
    assert point.tok_s == pytest.approx(8 * point.user_tok_s)
    assert not built.scheduler.has_work
    assert built.scheduler.blocks.tokens_used == 0


@pytest.mark.parametrize(("batch", "context"), [(9, 100), (1, 40_000)])
def test_what_does_not_fit_is_refused_before_anything_runs(batch: int, context: int) -> None:
    built = engine()
    with pytest.raises(ConfigError) as caught:
        Bench(built).decode(batch, context, 4)
    assert caught.value.hint
    assert not built.scheduler.has_work


points = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=20)


class Runs:
    """A runner as far as its path goes."""

    def __init__(self, native: native_start.NativeStart) -> None:
        self.native = native

    @property
    def path(self) -> str:
        return "eager" if self.native.model is None else "compiled"


def test_a_build_under_way_is_waited_for_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an empty machine every figure was one of eager steps, twenty times as long, and nothing said so."""
    ended = threading.Event()

    def make(_library: Any) -> Any:
        ended.wait(10)
        return object()

    monkeypatch.setattr(native_start, "is_built", lambda _folder: False)
    monkeypatch.setattr(native_start, "load_library", lambda _folder: None)
    native = native_start.NativeStart("", make)
    assert native.building
    threading.Timer(0.05, ended.set).start()
    assert settled_path(Runs(native)) == "compiled"
    assert not native.building
    eager = native_start.NativeStart("", make, "engine.enforce_eager is set")
    assert settled_path(Runs(eager)) == "eager: engine.enforce_eager is set"


@given(points)
def test_nothing_beats_the_frontier_and_everything_else_is_beaten(pairs: list[tuple[int, int]]) -> None:
    made = [Point("engine.decode", {"batch": i}, [1.0], float(tok_s), float(user)) for i, (user, tok_s) in enumerate(pairs)]
    best = pareto(made)
    speeds = [p.user_tok_s or 0.0 for p in best]
    assert speeds == sorted(speeds)
    for point in made:
        beaten = any(b.tok_s >= point.tok_s and (b.user_tok_s or 0) >= (point.user_tok_s or 0) for b in best)
        assert beaten
    for a in best:
        for b in best:
            assert a is b or a.tok_s > b.tok_s or (a.user_tok_s or 0) > (b.user_tok_s or 0)


def test_the_command_measures_the_engine_itself(dix: Dix, home: Path, tmp_path: Path) -> None:
    arguments = ["--model", "null", "--prefill", "256", "--decode", "1,4", "--steps", "4", "--repeats", "2"]
    ran = dix("bench", "engine", *arguments, "--html", tmp_path / "e.html", "--json")
    assert ran.code == 0, ran.err
    ids = [point["id"] for point in ran.json["points"]]
    assert ids == ["engine.prefill", "engine.decode", "engine.decode"]
    (folder,) = (home / "state" / "runs").iterdir()
    kept = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    assert kept == ran.json["points"]
    assert all(point["schema"] == "dix.bench/1" and point["time_us"]["n"] for point in kept)
    assert "<svg" in (tmp_path / "e.html").read_text()
    assert dix("bench", "engine", "--prefill", "many").code == 2
