"""`dix bench agentx` as a command: values, the dry run, and exit codes before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_cli.bench.agentx_plan import Asked, recipe_hash, repeat, resolve_plan
from deepinfer_cli.bench.agentx_preflight import Preflight
from deepinfer_cli.commands.bench_agentx import parse_extra, parse_slo, parse_start
from deepinfer_cli.invocation import Invocation, Shared, prepare
from deepinfer_cli.main import main
from hicache.errors import ConfigError
from tests.cli.bench.agentx_fake_server import FakeServer, tokenizer_dir
from tests.cli.bench.agentx_samples import plan


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(home: Path) -> Invocation:
    return prepare(Shared(quiet=True), {}, {})


def asked(home: Path, **changes: object) -> Asked:
    return Asked(tokenizer=tokenizer_dir(home / "tok"), **changes)  # type: ignore[arg-type]


FOUND = Preflight("http://127.0.0.1:1", "tiny", max_context=32768)


def test_defaults_are_an_hour_and_the_embedded_model_gets_the_bundled_traces(home: Path, call: Invocation) -> None:
    made, said = resolve_plan(call, asked(home), FOUND)
    assert (made.duration_s, made.grace_s, made.warmup_s, made.seed, made.start) == (3600.0, 30.0, 60.0, 42, (0.25, 0.75))
    assert (made.traces.name, made.max_context) == ("bundled", 32768)
    assert said == ["traces bundled: the served model is the embedded one"]


@pytest.mark.parametrize(
    ("changes", "duration_s", "grace_s", "warmup_s"),
    [
        ({"fast": True}, 1200.0, 30.0, 60.0),
        ({"duration_s": 60.0}, 60.0, 10.0, 6.0),
        ({"duration_s": 60.0, "grace_s": 2.0, "warmup_s": 0.0}, 60.0, 2.0, 0.0),
    ],
)
def test_short_windows_get_short_grace_and_warmup(
    changes: dict[str, object], duration_s: float, grace_s: float, warmup_s: float, home: Path, call: Invocation
) -> None:
    made, _ = resolve_plan(call, asked(home, traces="bundled", **changes), FOUND)
    assert (made.duration_s, made.grace_s, made.warmup_s) == (duration_s, grace_s, warmup_s)


def test_unknown_model_needs_its_tokenizer(home: Path, call: Invocation) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_plan(call, Asked(traces="bundled"), Preflight("http://127.0.0.1:1", "large"))
    assert "--tokenizer" in caught.value.hint


def test_repeats_have_seeds_42_43_and_one_recipe_hash() -> None:
    first, second = repeat(plan(), 0), repeat(plan(), 1)
    assert (first.seed, second.seed) == (42, 43)
    assert recipe_hash(first) == recipe_hash(second)
    assert recipe_hash(plan(concurrency=4)) != recipe_hash(first)
    assert recipe_hash(plan(url="http://other")) == recipe_hash(first)


def test_values_with_units() -> None:
    assert parse_start("25:75") == (0.25, 0.75)
    assert parse_slo("ttft=2s,tpot=50ms") == {"ttft": 2.0, "tpot": 0.05}
    assert parse_extra('{"temperature": 0}') == {"temperature": 0}
    for bad in ("75:25", "25", "0:101"):
        with pytest.raises(ConfigError):
            parse_start(bad)
    with pytest.raises(ConfigError, match="ttfb"):
        parse_slo("ttfb=2s")
    with pytest.raises(ConfigError, match="not JSON"):
        parse_extra("{")


def test_dry_run_prints_environment_and_command_and_starts_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        code = main(
            ["bench", "agentx", "--url", server.url, "--tokenizer", str(tokenizer_dir(home / "tok")), "--duration", "60s", "--dry-run"]
        )
    out = capsys.readouterr().out
    assert code == 0
    assert f"  --url {server.url} \\" in out.splitlines()
    assert "  --benchmark-duration 60 \\" in out.splitlines()
    assert "  --max-context-length 131072 \\" in out.splitlines()
    assert not (home / "home" / "state" / "runs").exists()
    assert server.bodies == []


def test_dry_run_as_json_is_one_document(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "agentx", "--port", "1", "--tokenizer", str(tokenizer_dir(home / "tok")), "--fast", "--dry-run", "--json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "dix.agentx-command/1"
    assert document["arguments"][:2] == ["aiperf", "profile"]
    assert "HF_HUB_OFFLINE" in document["unset"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--port", "1"], 4),
        (["--port", "1", "--harness", "fork"], 3),
        (["--port", "1", "--harness", "vegeta"], 2),
        (["--port", "1", "--cache", "lukewarm"], 2),
        (["--port", "1", "--duration", "soon"], 2),
        (["--port", "1", "--concurrency", "0"], 2),
    ],
)
def test_exit_codes_before_anything_is_started(arguments: list[str], code: int, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "agentx", *arguments]) == code
    assert capsys.readouterr().out == ""
    assert not list((home / "home").glob("state/runs/*"))
