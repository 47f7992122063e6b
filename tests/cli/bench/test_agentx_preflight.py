"""The questions asked before the load."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_cli.api import Api
from deepinfer_cli.bench.agentx_plan import settle_cache
from deepinfer_cli.bench.agentx_preflight import Preflight, PreflightFailed, check, reach
from hicache.errors import ConfigError
from server.errors import ServerUnreachable
from tests.cli.bench.agentx_fake_server import FakeServer, Faults, tokenizer_dir, with_faults
from tests.cli.bench.agentx_samples import golden_traces, plan


def ask(tmp_path: Path, faults: Faults | None = None, cache: str = "cold") -> tuple[Preflight, FakeServer]:
    with FakeServer(faults) as server:
        api = Api(server.url)
        found = reach(api)
        check(api, "", found, tokenizer_dir(tmp_path / "tok"), golden_traces(), cache, tmp_path)
    return found, server


def test_good_server_passes_and_its_cache_is_emptied(tmp_path: Path) -> None:
    found, server = ask(tmp_path)
    assert (found.model, found.ours, found.ranks, found.caches, found.has_metrics) == ("tiny", True, 2, True, True)
    assert (found.max_context, found.dropped, server.resets) == (131072, 0, 1)


def test_cache_stays_as_it_is_unless_cold_is_asked_for(tmp_path: Path) -> None:
    assert ask(tmp_path, cache="asis")[1].resets == 0


def test_unreachable_server_is_exit_code_4() -> None:
    with pytest.raises(ServerUnreachable) as caught:
        reach(Api("http://127.0.0.1:1"))
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (with_faults(usage=False), "no usage"),
        (with_faults(count_lies=40), "tokens by"),
        (with_faults(probe_half=True), "got 4"),
        (with_faults(answers_as="other"), "'other' answered"),
        (with_faults(refuse_roles=True), "two assistant messages"),
    ],
)
def test_server_that_cannot_give_a_valid_run_is_refused_before_the_load(faults: Faults, words: str, tmp_path: Path) -> None:
    with pytest.raises(PreflightFailed, match=words) as caught:
        ask(tmp_path, faults)
    assert caught.value.hint
    assert caught.value.exit_code == 5


def test_foreign_server_passes_with_what_it_has_and_is_measured_as_it_is(tmp_path: Path) -> None:
    found, server = ask(tmp_path, with_faults(foreign=True))
    assert (found.ours, found.has_metrics, found.can_reset, server.resets) == (False, False, False, 0)
    assert any("cannot reset" in note for note in found.notes)
    assert settle_cache(plan(), found).cache == "asis"
    assert settle_cache(plan(), Preflight("", "", can_reset=True)).cache == "cold"


def test_missing_cached_tokens_are_a_note(tmp_path: Path) -> None:
    found, _ = ask(tmp_path, with_faults(cached=False))
    assert any("no cached tokens" in note for note in found.notes)
    assert found.caches is None


def test_traces_beyond_the_context_are_counted_and_none_left_is_an_error(tmp_path: Path) -> None:
    found, _ = ask(tmp_path, with_faults(context=4000))
    assert found.dropped == 1
    with pytest.raises(PreflightFailed, match="no trace fits"):
        ask(tmp_path, with_faults(context=100))


def test_tokenizer_directory_without_its_file_is_an_error(tmp_path: Path) -> None:
    from deepinfer_cli.bench.agentx_plan import keep_tokenizer

    with pytest.raises(ConfigError, match=r"no tokenizer.json"):
        keep_tokenizer(tmp_path, tmp_path)


def test_tokenizer_is_kept_under_its_content_not_its_name(tmp_path: Path) -> None:
    from deepinfer_cli.bench.agentx_plan import keep_tokenizer

    source = tokenizer_dir(tmp_path / "tok")
    (source / "modeling.py").write_text("raise SystemExit")
    first = keep_tokenizer(source, tmp_path)
    assert sorted(p.name for p in first.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert keep_tokenizer(source, tmp_path) == first
    (source / "tokenizer.json").write_text((source / "tokenizer.json").read_text() + "\n")
    assert keep_tokenizer(source, tmp_path) != first
