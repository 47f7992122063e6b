"""Trace files: the generator, the strict reader, and the named sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.bench.agentx_generate import SHAPES, make_trace, write_trace
from deepinfer_cli.bench.agentx_sets import GENERATED, Recipe, default_set, ensure_generated, generate, open_traces
from deepinfer_cli.bench.agentx_traces import ideal_hit_share, read_traces
from hicache.errors import ConfigError
from tests.cli.bench.agentx_samples import GOLDEN, golden_traces


@pytest.mark.parametrize("shape", list(SHAPES))
def test_generator_reproduces_the_golden_traces_byte_for_byte(shape: str, tmp_path: Path) -> None:
    made = write_trace(tmp_path, make_trace(shape, f"syn-{shape}"))
    assert made.read_bytes() == (GOLDEN / "traces" / made.name).read_bytes()


def test_golden_set_has_the_sizes_its_readme_states() -> None:
    traces = golden_traces()
    requests = [r for t in traces.traces for r in t.requests]
    assert (len(traces.traces), len(requests), sum(t.num_helpers for t in traces.traces)) == (5, 70, 5)
    assert sum(r.prompt_tokens for r in requests) == 150_106
    assert sum(r.output_tokens for r in requests) == 4_780


def test_ideal_hit_rate_matches_the_published_figures_at_both_granularities() -> None:
    assert round(ideal_hit_share(golden_traces()) or 0, 3) == 0.783
    assert round(ideal_hit_share(golden_traces(), page=64, keep=0) or 0, 3) == 0.797


def test_recorded_request_is_found_by_row_and_helper_row() -> None:
    traces = golden_traces()
    helper = traces.recorded("syn-one_helper", 3, 1)
    assert helper is not None
    assert helper.prompt_tokens > 0
    assert traces.recorded("syn-one_helper", 3) is None
    assert traces.recorded("syn-linear", 99) is None


def test_traces_beyond_the_context_are_counted() -> None:
    traces = golden_traces()
    peaks = sorted(t.peak_tokens for t in traces.traces)
    assert traces.too_long(peaks[-1]) == 0
    assert traces.too_long(peaks[-1] - 1) == 1
    assert traces.too_long(1) == 5


def _write(folder: Path, **changes: Any) -> None:
    document = make_trace("linear", "syn-linear") | changes
    (folder / f"{changes.get('id', 'a')}.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speed": 3}, "unknown key 'speed'"),
        ({"hash_id_scope": "global"}, "scope 'global'"),
        ({"block_size": 0}, "block_size 0"),
        ({"requests": [{"t": 0, "type": "x", "model": "m"}]}, "type 'x'"),
        ({"requests": [{"t": 0, "type": "n", "model": "m", "ttft": 1}]}, "ttft"),
        ({"requests": [{"t": 0, "type": "n"}]}, "lacks 'model'"),
        (
            {"requests": [{"t": 0, "type": "subagent", "agent_id": "a", "requests": [{"t": 0, "type": "subagent", "model": "m"}]}]},
            "subagent",
        ),
    ],
)
def test_bad_trace_is_refused_with_its_fault(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    _write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        read_traces("bad", tmp_path)


def test_two_traces_with_one_id_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(make_trace("linear", "same")))
    with pytest.raises(ConfigError, match="'same'"):
        read_traces("twice", tmp_path)


def test_empty_directory_and_unknown_name_are_errors_with_names_to_choose_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*.json"):
        read_traces("empty", tmp_path)
    with pytest.raises(ConfigError, match="no trace set") as caught:
        open_traces("bundeld", tmp_path)
    assert "bundled" in caught.value.hint


def test_generated_set_is_made_once_and_no_two_sessions_are_alike(tmp_path: Path) -> None:
    first = ensure_generated("small", tmp_path)
    stamp = first.stat().st_mtime_ns
    assert ensure_generated("small", tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    traces = open_traces("small", tmp_path)
    assert len(traces.traces) == GENERATED["small"].sessions
    assert len({tuple((r.prompt_tokens, r.output_tokens) for r in t.requests) for t in traces.traces}) == len(traces.traces)
    assert 25_000 < max(t.peak_tokens for t in traces.traces) < 45_000
    assert [p.name for p in first.parent.iterdir()] == [first.name]


def test_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder, seed in zip(folders, (7, 7, 8), strict=True):
        folder.mkdir()
        generate(Recipe(10, 2.0), folder, seed=seed)
    digests = [read_traces("x", folder).digest for folder in folders]
    assert digests[0] == digests[1] != digests[2]


def test_bundled_set_is_the_golden_set(tmp_path: Path) -> None:
    assert open_traces("bundled", tmp_path).digest == golden_traces().digest


def test_default_set_says_why(tmp_path: Path) -> None:
    assert default_set(True, {})[0] == "bundled"
    name, why = default_set(False, {"HF_HOME": str(tmp_path)})
    assert (name, "not in" in why) == ("small", True)
    (tmp_path / "hub" / "datasets--owner--cc-traces-weka-062126").mkdir(parents=True)
    assert default_set(False, {"HF_HOME": str(tmp_path)})[0] == "public"


def test_public_corpus_is_only_named(tmp_path: Path) -> None:
    traces = open_traces("public", tmp_path)
    assert (traces.folder, traces.traces) == (None, ())
    assert traces.public == "semianalysis_cc_traces_weka_062126"
