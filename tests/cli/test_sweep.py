"""Sweeps: cells, their order, and campaigns that go on after a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.bench.cells import cells, in_order, parse_varied, with_values
from deepinfer_cli.bench.recipe import load_recipe, parse_recipe
from deepinfer_cli.bench.runs import list_runs
from hicache.errors import ConfigError
from tests.cli.fake_server import serving

Dix = Callable[..., Any]
SMALL = """
name = "small"
[load]
conversations = 2
[prompt]
first_tokens = 20
[output]
tokens = 4
[vary]
"load.concurrency" = [1, 2]
"""


def test_cells_are_the_product_and_each_is_a_recipe_of_its_own() -> None:
    recipe = load_recipe("smoke")
    made = cells(recipe, {"load.concurrency": [1, 2], "output.tokens": [4, 8, 16]})
    assert len(made) == 6
    assert len({cell.recipe.fingerprint() for cell in made}) == 6
    assert made[0].name == "load.concurrency=1 output.tokens=4"
    assert (made[-1].recipe.load.concurrency, made[-1].recipe.output.tokens) == (2, 16)


def test_server_settings_and_urls_leave_the_recipe_alone() -> None:
    recipe = load_recipe("smoke")
    made = cells(recipe, {"engine.max_num_seqs": [4, 8], "url": ["http://a", "http://b"]})
    assert {cell.recipe.fingerprint() for cell in made} == {recipe.fingerprint()}
    assert made[1].engine == {"engine.max_num_seqs": "4"}
    assert made[1].url == "http://b"


def test_repeated_cells_alternate_forwards_and_backwards() -> None:
    assert in_order(2, 4, "abba") == [0, 1, 1, 0, 0, 1, 1, 0]
    shuffled = in_order(3, 5, "random")
    assert Counter(shuffled) == {0: 5, 1: 5, 2: 5}
    assert all(set(shuffled[i : i + 3]) == {0, 1, 2} for i in range(0, 15, 3))


@pytest.mark.parametrize("text", ["load.concurrency", "=1,2", "load.concurrency="])
def test_a_malformed_vary_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_varied([text])


def test_varied_values_keep_their_types() -> None:
    assert parse_varied(["load.concurrency=1,2", "cache.bypass=true", "cache.state=cold"]) == {
        "load.concurrency": [1, 2],
        "cache.bypass": [True],
        "cache.state": ["cold"],
    }
    with pytest.raises(ConfigError, match=r"load.concurrency is 'many'"):
        with_values(load_recipe("smoke"), {"load.concurrency": "many"})
    with pytest.raises(ConfigError, match="cannot be varied"):
        parse_recipe({"name": "x", "vary": {"load.speed": [1]}}, "x")


def test_a_recipe_that_varies_runs_once_per_value_and_keeps_its_runs_together(dix: Dix, home: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    with serving() as server:
        ran = dix("bench", "run", "./small.toml", "--url", server.url)
    assert ran.code == 0, ran.err
    runs = list_runs(home / "state" / "runs")
    assert [run["labels"]["cell"] for run in runs] == ["load.concurrency=1", "load.concurrency=2"]
    (sweep,) = {run["labels"]["sweep"] for run in runs}
    assert "load.concurrency=2" in ran.out
    assert dix("report", sweep, "--html", tmp_path / "sweep.html").code == 0
    assert "load.concurrency=2" in (tmp_path / "sweep.html").read_text()


def test_a_sweep_goes_on_after_a_dead_server_and_resumes_only_what_is_missing(dix: Dix, home: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.split("[vary]")[0])
    with serving() as gone:
        pass
    with serving() as server:
        urls = f"url={gone.url},{server.url}"
        ran = dix("bench", "sweep", "./small.toml", "--vary", urls, "--repeats", "2")
        assert ran.code == 4
        runs = list_runs(home / "state" / "runs")
        assert len(runs) == 2
        asked = len(server.requests)
        again = dix("bench", "sweep", "./small.toml", "--vary", urls, "--repeats", "2", "--resume", runs[0]["labels"]["sweep"])
        assert again.code == 4
        assert len(server.requests) == asked
    assert "2 runs were there already" in again.err
