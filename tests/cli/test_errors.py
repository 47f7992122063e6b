"""One error boundary: one line, one hint, the right exit code, never a traceback."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli import app as main_module
from deepinfer_cli.commands import config as config_command
from hicache.errors import ConfigError, DixError, MachineError
from server.errors import ServerUnreachable
from server.state import ServerState, record_self

Dix = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        ([], 0),
        (["nonsense"], 2),
        (["serve", "--nonsense"], 2),
        (["serve", "--max-num-seqs", "many"], 2),
        (["serve", "--max-num-seqs", "0"], 2),
        (["serve", "--set", "engine.max_num_seq=3"], 2),
        (["serve", "--set", "nonsense"], 2),
        (["serve", "no-such-model"], 2),
        (["serve", "--yoco-keep-tokens", "0"], 2),
        (["config", "show", "nowhere"], 2),
        (["config", "show", "--config", "missing.toml"], 2),
        (["stop"], 4),
        (["stop", "ghost"], 4),
        (["logs"], 4),
        (["status"], 0),
        (["status", "ghost"], 4),
        (["chat", "--port", "1", "--once", "hi"], 4),
        (["cache", "stats", "--port", "1"], 4),
        (["bench", "run", "no-such-recipe"], 2),
        (["bench", "run", "smoke", "--port", "1"], 4),
        (["report"], 2),
        (["render", "missing.json"], 2),
        (["generate"], 2),
        (["model", "info", "/nonexistent/model"], 2),
        (["model", "verify", "nowhere"], 2),
    ],
)
def test_exit_codes(dix: Dix, arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    ran = dix(*arguments)
    assert ran.code == code, ran.err
    assert "Traceback" not in ran.err
    if code:
        assert ran.err.splitlines()[0].startswith("error: ")


def test_keep_tokens_0_names_both_flags(dix: Dix) -> None:
    err = dix("serve", "--yoco-keep-tokens", 0).err
    assert "--yoco-keep-tokens" in err
    assert "--hicache-size-gb 0" in err


def test_the_embedded_model_has_nothing_to_be_verified_against_and_says_what_has(dix: Dix) -> None:
    ran = dix("model", "verify", "tiny")
    assert (ran.code, ran.err.splitlines()[0]) == (2, "error: the embedded model has no reference vectors")
    assert "dix model eval tiny" in ran.err
    assert "dix model verify tests/golden/model" in ran.err


def test_errors_are_one_line_and_one_hint(dix: Dix) -> None:
    assert dix("stop").err == "error: no server is running\n hint: dix start starts one\n"


def test_json_failures_are_documents(dix: Dix) -> None:
    ran = dix("stop", "--json")
    assert ran.json == {"schema": "dix.error/1", "code": 4, "message": "no server is running", "hint": "dix start starts one"}
    assert ran.code == 4


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (MachineError("x"), 3),
        (ServerUnreachable("x"), 4),
        (DixError("x"), 70),
        (RuntimeError("x"), 70),
        (OSError(errno.ENOSPC, "No space left on device", "/full"), 3),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
)
def test_every_kind_of_failure_has_its_code(dix: Dix, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    monkeypatch.setattr(config_command, "_settings_of", failing(error))
    monkeypatch.setattr("deepinfer_cli.ui.discard_stdout", lambda: None)
    assert dix("config", "list").code == code


def test_a_bug_keeps_its_traceback_in_a_file(dix: Dix, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(config_command, "_settings_of", failing(RuntimeError("surprise")))
    ran = dix("config", "list")
    path = Path(ran.err.split("traceback: ")[1].strip())
    assert path.parent == home / "state" / "crashes"
    assert "RuntimeError: surprise" in path.read_text()
    assert "RuntimeError: surprise" in ran.err


def test_verbose_shows_the_cause(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError("outer")
    error.__cause__ = ValueError("inner")
    monkeypatch.setattr(config_command, "_settings_of", failing(error))
    assert "because ValueError: inner" in dix("config", "list", "-v").err
    assert "inner" not in dix("config", "list").err


def test_exit_code_does_not_depend_on_quiet(dix: Dix) -> None:
    assert dix("stop", "-q").code == dix("stop").code == dix("stop", "-vv").code == 4


def test_usage_errors_name_the_help(dix: Dix) -> None:
    assert "dix serve --help" in dix("serve", "--nonsense").err


def test_dix_alone_shows_what_to_do_next(dix: Dix) -> None:
    ran = dix()
    assert ran.code == 0
    for words in ("nothing running", "dix chat tiny", "dix serve tiny", "dix bench run smoke"):
        assert words in ran.out


def test_dix_beside_a_running_server_names_what_can_be_done_with_it(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:
    running = ServerState("t", "u", "b", "127.0.0.1", 8901, "tiny", "tiny", "ready", record_self("supervisor"))
    monkeypatch.setattr("deepinfer_cli.commands.overview.list_servers", lambda _state: [running])
    out = dix().out
    assert "t at http://127.0.0.1:8901" in out
    assert "dix stop" in out
    assert "dix serve tiny" not in out


def test_version_is_one_line(dix: Dix) -> None:
    assert dix("--version").out == f"dix {main_module.version_text()}\n"


def test_doctor_always_reports(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepinfer_cli.doctor as doctor

    monkeypatch.setattr(doctor, "memory", failing(RuntimeError("no /proc")))
    findings = json.loads(dix("doctor", "--json").out)["findings"]
    assert len(findings) == 10
    assert any("no /proc" in finding["text"] and finding["verdict"] == "warn" for finding in findings)


@pytest.mark.parametrize(("built", "words"), [(True, "/cpu_step-"), (False, "not built yet")])
def test_doctor_tells_whether_the_cpu_step_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool, words: str) -> None:
    from deepinfer_cli.doctor import native_step
    from engine.native_library import built_path

    if built:
        built_path(tmp_path).write_bytes(b"")
    found = native_step(str(tmp_path))
    assert (found.verdict, words in found.text) == ("ok", True)


def test_doctor_says_why_the_cpu_runs_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_cli.doctor import native_step

    monkeypatch.setenv("PATH", str(tmp_path))
    found = native_step(str(tmp_path))
    assert found.verdict == "warn"
    assert "no compiler" in found.text
    assert "g++" in found.fix


def test_doctor_lists_the_kernel_of_every_operation(dix: Dix) -> None:
    table = {row["op"]: row for row in dix("doctor", "--ops", "--json").json["ops"]}
    assert table["rms_norm"]["backend"] in ("reference", "triton", "cuda")
    assert all(row["why"] and row["compiled"] for row in table.values())
    assert len(table) > 5
