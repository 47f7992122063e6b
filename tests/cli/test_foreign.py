"""Other engines: the shipped recipes measure a server that knows nothing of ours, and avoid its prefix cache as well as it allows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from deepinfer_cli.api import Api
from deepinfer_cli.bench.cells import with_values
from deepinfer_cli.bench.load import Job, drive
from deepinfer_cli.bench.preflight import preflight, schema_fields
from deepinfer_cli.bench.prompts import make_conversations
from deepinfer_cli.bench.recipe import Recipe, load_recipe, parse_recipe
from tests.cli.fake_server import serving

Dix = Callable[..., Any]


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    """A transformers server in a process of its own; its first line names its URL."""
    script = Path(__file__).with_name("foreign_server.py")
    child = subprocess.Popen([sys.executable, str(script), "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield child.stdout.readline().split()[1]
    finally:
        child.kill()
        child.wait()


@pytest.mark.e2e
def test_the_smoke_recipe_measures_a_foreign_server(foreign: str, dix: Dix, home: Path) -> None:
    ran = dix("bench", "run", "smoke", "--url", foreign)
    assert ran.code == 0, ran.err
    (run,) = (home / "state" / "runs").iterdir()
    requests = pd.read_parquet(run / "requests.parquet")
    assert len(requests) == 32
    assert requests["ok"].all()
    assert (requests["output_tokens"] == 16).all()
    assert (requests["ttft_ms"] > 0).all()
    assert requests["tpot_ms"].notna().all()
    assert "prefix cache could not be reset" in ran.err
    first = requests.loc[requests["turn"] == 0, "prompt_tokens"].mean()
    assert 340 + 64 <= first <= 1.25 * (340 + 64)  # sized by what the server said a word costs; the chat format adds a little
    report = dix("report", "last", "--html", home / "page.html")
    assert report.code == 0
    assert (home / "page.html").stat().st_size > 10_000


def bypassing() -> Recipe:
    return parse_recipe(
        {"name": "x", "load": {"conversations": 3}, "prompt": {"first_tokens": 20}, "output": {"tokens": 4}, "cache": {"bypass": True}}, "x"
    )


async def sent_with(tmp_path: Path, bypass: str, recipe: Recipe, salt: str = "abcd") -> list[dict[str, Any]]:
    with serving(ours=bypass == "field") as server:
        conversations = make_conversations(recipe, lambda text: len(text.split()))
        job = Job(server.url, "fake", recipe, conversations, tmp_path / "r.jsonl", server.ours, 20.0, bypass=bypass, salt=salt)
        await drive(job, (tmp_path / "progress").open("w"))
        return server.requests


async def test_bypass_uses_what_the_server_offers(tmp_path: Path) -> None:
    ours = await sent_with(tmp_path, "field", bypassing(), "")
    assert all(body["prefix_cache"] is False for body in ours)
    salted = await sent_with(tmp_path, "cache_salt", bypassing())
    assert len({body["cache_salt"] for body in salted}) == 3
    assert not any("prefix_cache" in body for body in salted)
    worded = await sent_with(tmp_path, "prefix", bypassing())
    starts = {body["messages"][0]["content"].split()[0] for body in worded}
    assert len(starts) == 3
    assert not any({"prefix_cache", "cache_salt"} & set(body) for body in worded)


async def test_a_cold_run_without_reset_keeps_apart_from_earlier_runs_but_hits_its_own_turns(tmp_path: Path) -> None:
    recipe = with_values(bypassing(), {"cache.bypass": False, "cache.state": "cold", "load.turns": 2})
    sent = await sent_with(tmp_path, "prefix", recipe)
    assert len({body["messages"][0]["content"].split()[0] for body in sent}) == 1
    by_length = sorted(sent, key=lambda body: len(body["messages"]))
    assert all(any(long["messages"][0] == short["messages"][0] for long in by_length[3:]) for short in by_length[:3])


def test_a_job_survives_its_way_to_the_child() -> None:
    recipe = load_recipe("burst")
    job = Job("http://x", "m", recipe, make_conversations(recipe, lambda text: len(text.split()))[:1], Path("r"), False, 1.0, "secret")
    plain = json.loads(json.dumps(job.to_json()))
    assert "secret" not in json.dumps(plain)
    assert Job.from_json(plain, "secret") == job


def test_the_published_schema_names_the_fields() -> None:
    schemas = {"ChatCompletionRequest": {"properties": {"messages": {}, "cache_salt": {}}}, "Other": {"properties": {"ignore_eos": {}}}}
    assert schema_fields({"components": {"schemas": schemas}}) == {"messages", "cache_salt"}
    assert schema_fields(None) == schema_fields([]) == frozenset()


def test_preflight_learns_the_size_of_a_word_where_nobody_counts() -> None:
    with serving(ours=False) as server:
        found = preflight(Api(server.url), load_recipe("smoke"))
    assert found.tokens_per_word == pytest.approx(1.0)
    assert found.bypass == "prefix"
    assert found.salt
    assert any("could not be reset" in note for note in found.notes)
