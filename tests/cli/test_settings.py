"""One precedence, provenance for every value, and an error for every name that nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_cli.config import BenchConfig
from deepinfer_cli.settings import SECTIONS, UNUSED_ALIASES, all_settings, convert, find_files, read_environment, resolve
from hicache.errors import ConfigError

SOURCES = ("default", "user", "local", "environment", "flag")


@given(st.dictionaries(st.sampled_from(SOURCES[1:]), st.integers(1, 10_000), max_size=4))
def test_the_strongest_source_wins(tmp_path_factory: pytest.TempPathFactory, given_values: dict[str, int]) -> None:
    folder = tmp_path_factory.mktemp("precedence")
    files = []
    for name in ("local", "user"):
        path = folder / f"{name}.toml"
        path.write_text(f"[engine]\nprefill_attempt_interval = {given_values[name]}\n" if name in given_values else "")
        files.append(path)
    environ = {"DIX_ENGINE_PREFILL_ATTEMPT_INTERVAL": str(given_values["environment"])} if "environment" in given_values else {}
    flags = {"engine.prefill_attempt_interval": str(given_values["flag"])} if "flag" in given_values else {}
    found = resolve(flags=flags, environ=environ, files=files).values["engine.prefill_attempt_interval"]
    strongest = max(given_values, key=SOURCES.index, default="default")
    assert found.value == given_values.get(strongest, 70)
    assert found.source == {"local": str(files[0]), "user": str(files[1])}.get(strongest, strongest)


def test_every_setting_survives_its_own_text() -> None:
    for setting in all_settings().values():
        if setting.default != "":
            assert convert(setting, str(setting.default), setting.key) == setting.default


def test_no_two_settings_share_a_flag() -> None:
    flags: dict[str, str] = {}
    for setting in all_settings().values():
        assert setting.flag not in flags, f"{setting.key} and {flags.get(setting.flag)} are both {setting.flag}"
        flags[setting.flag] = setting.key


def test_every_section_is_built_from_its_defaults() -> None:
    settings = resolve(flags={}, environ={}, files=[]).settings()
    for name, cls in SECTIONS.items():
        assert isinstance(getattr(settings, name), cls)
    assert settings.bench == BenchConfig()


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("DIX_ENGINE_MAX_NUM_SEQ", "DIX_ENGINE_MAX_NUM_SEQS"), ("DIX_HICACHE_SIZE", "DIX_HICACHE_SIZE_GB"), ("DIX_ZZZ", "")],
)
def test_an_unknown_variable_is_an_error_with_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not a setting") as caught:
        read_environment({name: "1"})
    assert suggestion in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DIX_SERVICE_HOST", "10.0.0.1"),
        ("DIX_SERVICE_PORT_HTTP", "80"),
        ("DIX_WEB_SERVICE_HOST", "10.0.0.1"),
        ("DIX_PORT_8888_TCP", "tcp://10.0.0.1:8888"),
        ("DIX_SERVER_PORT", "tcp://10.0.0.1:8888"),
        ("DIX_HOME", "/somewhere"),
    ],
)
def test_names_that_a_cluster_injects_are_ignored(name: str, value: str) -> None:
    assert read_environment({name: value}) == ({}, [])


def test_aliases_of_the_reference_release_set_our_settings() -> None:
    environ = {"DEEPINFER_ACCELERATOR": "nvidia", "DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL": "7", "DEEPINFER_BATCH_INVARIANT": "False"}
    values, warnings = read_environment(environ)
    assert values == {"engine.device": "cuda", "engine.prefill_any_interval": 7, "engine.batch_invariant": False}
    assert warnings == []


def test_an_alias_that_disagrees_with_our_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="but DIX_ENGINE_PREFILL_ANY_INTERVAL is"):
        read_environment({"DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL": "7", "DIX_ENGINE_PREFILL_ANY_INTERVAL": "8"})
    values, _ = read_environment({"DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL": "7", "DIX_ENGINE_PREFILL_ANY_INTERVAL": "7"})
    assert values == {"engine.prefill_any_interval": 7}


def test_known_names_without_effect_warn_once() -> None:
    values, warnings = read_environment({"DEEPINFER_GLOO_TIMEOUT": "1", "DEEPINFER_XGRAMMAR_TIMEOUT": "2", "DEEPINFER_HF_MODEL_DIR": "/m"})
    assert values == {}
    assert warnings == ["without effect in this engine: DEEPINFER_GLOO_TIMEOUT, DEEPINFER_XGRAMMAR_TIMEOUT"]


def test_no_name_without_effect_is_that_of_a_setting() -> None:
    assert not {f"DEEPINFER_{name}" for name in UNUSED_ALIASES} & {alias for s in all_settings().values() for alias in s.knob.aliases}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nmax_num_seq = 4\n", "engine.max_num_seq is not a setting"),
        ("[engin]\n", "engin"),
        ("port = 8\n", "port"),
        ("[server]\nport = true\n", "server.port is True"),
        ("[server]\nport = 'x'\n", "server.port is 'x'"),
        ("[server\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "dix.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(flags={}, environ={}, files=[path])
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_nearest_file_upwards_is_read(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "dix.toml").write_text("")
    assert find_files(None, inner, tmp_path / "none.toml") == [tmp_path / "dix.toml"]
    (tmp_path / "a" / "dix.toml").write_text("")
    assert find_files(None, inner, tmp_path / "none.toml") == [tmp_path / "a" / "dix.toml"]
    assert find_files(tmp_path / "own.toml", inner, tmp_path / "none.toml") == [tmp_path / "own.toml"]


@pytest.mark.parametrize(("flag", "key", "value"), [("--grace", "server.grace_s", 120.0), ("--grace-s", "server.grace_s", 120.0)])
def test_times_take_units_under_both_names(dix: Callable[..., Any], flag: str, key: str, value: float) -> None:
    from deepinfer_cli.settings import all_settings

    assert all_settings()[key].flag == "--grace"
    assert convert(all_settings()[key], "2m", flag) == value


def test_config_show_tells_where_values_come_from(dix: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dix.toml").write_text("[engine]\nmax_num_seqs = 64\n")
    monkeypatch.setenv("DIX_SERVER_PORT", "9000")
    shown = dix("config", "show", "--json", "--set", "engine.dp=2").json["settings"]
    assert shown["engine.max_num_seqs"] == {"value": 64, "source": str(tmp_path / "dix.toml")}
    assert shown["server.port"] == {"value": 9000, "source": "environment"}
    assert shown["engine.dp"] == {"value": 2, "source": "flag"}
    assert shown["engine.ep"] == {"value": 1, "source": "default"}


def test_config_init_writes_a_file_that_reads_back(dix: Callable[..., Any], tmp_path: Path) -> None:
    assert dix("config", "init").code == 0
    text = (tmp_path / "dix.toml").read_text()
    (tmp_path / "dix.toml").write_text(
        "\n".join(line[2:] if " = " in line and line.startswith("# ") else line for line in text.splitlines())
    )
    assert dix("config", "show").code == 0
    assert dix("config", "init").code == 2
    assert dix("config", "init", "--force").code == 0
