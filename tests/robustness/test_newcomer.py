"""First steps: what somebody types who has read one page, and what comes back. The table is in docs/robustness.md.

Every answer is one line that names the mistake, one hint that can be pasted, and an exit code of the contract; nothing is a traceback,
nothing hangs, nothing is started for a request that cannot be served.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from deepinfer_cli import doctor
from deepinfer_cli.bench import aiperf_harness
from deepinfer_cli.sse import StreamError, StreamState
from server import launcher
from tests.cli.conftest import dix, home  # noqa: F401
from tests.cli.fake_server import serving
from tests.cli.test_talk import record_server

ROOT = Path(__file__).resolve().parents[2]
Dix = Callable[..., Any]
CLOSED_PORT = 1


@pytest.fixture(autouse=True)
def no_server_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes are found before anything is started."""

    def start(*_args: Any, **_keywords: Any) -> None:
        raise AssertionError("a server would be started")

    monkeypatch.setattr(launcher, "start", start)
    monkeypatch.setattr(launcher, "serve", start)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


PAGE = b"<!DOCTYPE html>\n<html><body>\n<h1>Hello</h1>\n</body></html>\n"
MODEL = b'{"data": [{"id": "m"}], '
ODD_ANSWERS = [
    b"null", b"[]", b"5", b'"x"', b"", b"{}", b"[" * 100_000, b"\xff", b'{"data": 5}', b'{"data": [5]}', b'{"data": [{"id": 5}]}',
    b'{"data": [{"id": "m", "max_model_len": "x"}]}', MODEL + b'"ranks": 5}', MODEL + b'"ranks": [5]}', MODEL + b'"totals": 5}',
    MODEL + b'"count": "x", "usage": 5}', MODEL + b'"choices": 5}',
]  # fmt: skip


@contextmanager
def page_server(status: int, body: bytes = PAGE) -> Iterator[str]:
    """Another program on the port: every path is a small page, or what else it may answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_args: Any) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def refused(ran: Any, code: int, *says: str) -> None:
    """One error line and one hint, the exit code, and the words that matter."""
    lines = [line for line in ran.err.splitlines() if line]
    assert ran.code == code, ran.err
    assert lines[-2].startswith("error: "), ran.err
    assert lines[-1].startswith(" hint: "), ran.err
    assert "Traceback" not in ran.err
    assert "this is a bug" not in ran.err
    for text in says:
        assert text in ran.err, f"{text!r} is not in {ran.err!r}"


# ---- names and arguments


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("chta", "did you mean dix chat?"),
        ("stats", "did you mean dix status?"),
        ("bench smoke", "did you mean dix bench run smoke?"),
        ("bench agentic", "did you mean dix bench agentx?"),
        ("serve --prot 1", "--port"),
        ("serve -dp 2", "did you mean --dp?"),
        ("serve --model tiny", "dix serve MODEL"),
        ("serve tiny extra", "dix serve --help"),
        ("serve tyni", "did you mean tiny?"),
        ("serve LICENSE", "no model 'LICENSE'"),
        ("serve --port abc", "takes an integer"),
        ("serve --dp 0", "allowed: >= 1"),
        ("start --memory-fraction 95", "allowed"),
        ("chat --temperature -1 --once hi", "dix chat --help"),
        ("chat --think maybe --once hi", "auto, on or off"),
        ("bench run smokey", "smoke"),
        ("bench run", "RECIPE"),
        ("report nothing", "error: "),
        ("render", "FILE"),
        ("model info .", "config.json"),
        ("config show engin", "did you mean engine?"),
        ("tune", "dix tune --help"),
        ("-V", "dix --help"),
        ("--json status", "dix status --json"),
    ],
)
def test_a_slip_of_the_keyboard_is_named_and_the_nearest_name_offered(dix: Dix, line: str, says: str) -> None:  # noqa: F811
    refused(dix(*line.split()), 2, says)


@pytest.mark.parametrize("line", ["help", "help chat", "help bench run", "chat -h", "bench --help"])
def test_help_is_there_however_it_is_asked_for(dix: Dix, line: str) -> None:  # noqa: F811
    ran = dix(*line.split())
    assert ran.code == 0
    assert ran.out.startswith("Usage: dix")


def test_an_empty_prompt_is_said_before_a_model_is_loaded(dix: Dix) -> None:  # noqa: F811
    refused(dix("generate", "The river", ""), 2, "prompt 2 of 2 is empty")
    refused(dix("generate"), 2, "there is no prompt")


def test_a_file_is_not_a_model(dix: Dix, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(dix("serve", "model.safetensors"), 2, "is a file", "config.json")


# ---- no server, the wrong one, several


@pytest.mark.parametrize(
    "line", ["chat --once hi", "check-cache", "cache stats", "bench run smoke", "bench agentx", "tune prefill-interval"]
)
def test_without_a_server_every_command_says_how_to_start_one(dix: Dix, line: str) -> None:  # noqa: F811
    refused(dix(*line.split(), "--port", CLOSED_PORT), 4, "does not answer", "dix start")


@pytest.mark.parametrize("line", ["stop", "logs", "logs ghost", "stop ghost"])
def test_what_needs_a_server_of_ours_says_that_there_is_none(dix: Dix, line: str) -> None:  # noqa: F811
    refused(dix(*line.split()), 4)


@pytest.mark.parametrize("address", ["htp://localhost:8888", "http://localhost:99999", "http://:8888", "localhost:0", "ftp://localhost"])
def test_an_impossible_address_is_not_called_a_silent_server(dix: Dix, address: str) -> None:  # noqa: F811
    refused(dix("chat", "--url", address, "--once", "hi"), 2, "for example http://127.0.0.1:8888")


def test_an_impossible_port_is_not_called_a_silent_server(dix: Dix) -> None:  # noqa: F811
    refused(dix("check-cache", "--port", 99999), 2, "1 to 65535")


@pytest.mark.parametrize(
    "form", ["http://127.0.0.1:{}", "http://127.0.0.1:{}/", "http://127.0.0.1:{}/v1", "127.0.0.1:{}", "localhost:{}/v1/"]
)
@pytest.mark.parametrize("how", ["--url", "argument"])
def test_a_server_is_found_however_its_address_is_written(dix: Dix, form: str, how: str) -> None:  # noqa: F811
    with serving() as server:
        address = form.format(server.port)
        ran = dix("chat", *(("--url", address) if how == "--url" else (address,)), "--once", "hello", "--max-tokens", 3)
    assert ran.code == 0, ran.err
    assert len(ran.out.split()) == 3


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("line", ["chat --once hi", "check-cache", "bench run smoke", "bench agentx"])
def test_another_program_on_the_port_is_called_what_it_is(dix: Dix, line: str, status: int) -> None:  # noqa: F811
    with page_server(status) as url:
        ran = dix(*line.split(), "--url", url)
    refused(ran, 4, "is not an OpenAI-compatible server", "another program listens there")
    assert "<" not in ran.err


def test_counters_of_a_foreign_page_are_one_line(dix: Dix) -> None:  # noqa: F811
    for status in (200, 404):
        with page_server(status) as url:
            ran = dix("cache", "stats", "--url", url)
        assert ran.code in (2, 4)
        assert "this is a bug" not in ran.err
        assert "<" not in ran.err


def test_two_servers_are_told_apart_by_name_and_port(dix: Dix, home: Path) -> None:  # noqa: F811
    record_server(home, "one", 1)
    record_server(home, "two", 2)
    refused(dix("chat", "--once", "hi"), 2, "2 servers are running", "--port 1 or --port 2")
    refused(dix("stop"), 2, "one, two")
    refused(dix("stop", "tow"), 4, "did you mean two?")


# ---- pipes, keys and terminals


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_pipe_starts_nothing_and_does_not_wait(dix: Dix, text: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    refused(dix("chat", "tiny"), 2, "nothing to send")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_talk(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from deepinfer_cli.commands import chat

    def lines(_prompt: str = "") -> str:
        if not asked:
            raise KeyboardInterrupt
        return asked.pop(0)

    def interrupted(_talk: chat.Talk, text: str) -> None:
        _talk.messages.append({"role": "user", "content": text})
        seen.append(len(_talk.messages))
        raise KeyboardInterrupt

    asked, seen = ["one", "two"], list[int]()
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lines)
    monkeypatch.setattr(chat.Talk, "say", interrupted)
    with serving() as server:
        ran = dix("chat", "--port", server.port)
    assert ran.code == 0
    assert ran.err.count("stopped") == 2
    assert seen == [1, 1], "a stopped question stays out of the talk"


def test_a_refused_message_does_not_end_the_talk(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    asked = iter([*["a message of more than ten words so that the fault applies here"] * 2, "/exit"])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _prompt="": next(asked))
    with serving(fault="refuse") as server:
        ran = dix("chat", "--port", server.port)
    assert ran.code == 0
    assert ran.err.count("error: ") == 2
    assert "/reset forgets the talk" in ran.err


@pytest.mark.parametrize("line", ["", "status", "config show", "bench list", "help"])
def test_sixty_columns_without_colour_cut_no_number_and_leave_no_escape(
    dix: Dix,  # noqa: F811
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    ran = dix(*line.split())
    assert ran.code in (0, 1)
    assert "\x1b" not in ran.out + ran.err
    assert not re.search(r"\d…", ran.out), "a cut number is a wrong number"


# ---- the machine


def dix_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "deepinfer_cli", *arguments],
        env=base | environment, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_without_a_compiler_doctor_says_what_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor.compiler()
    assert (found.probe, found.verdict) == ("compiler", "warn")
    assert "g++" in found.text + found.fix
    assert found.fix, "nothing to paste"


def test_without_a_home_directory_the_overview_still_prints(tmp_path: Path) -> None:
    done = dix_process(XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dix ")


def test_without_the_load_harness_its_installation_is_named(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def missing(_name: str) -> str:
        raise aiperf_harness.metadata.PackageNotFoundError

    monkeypatch.setattr(aiperf_harness.metadata, "version", missing)
    with serving() as server:
        refused(dix("bench", "agentx", "--port", server.port, "--traces", "bundled"), 3, "aiperf is not installed", "pip install")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_names_the_python_that_it_needs(tmp_path: Path) -> None:
    """An interpreter that calls itself 3.10: nothing is created or installed."""
    old = tmp_path / "python3"
    lie = "import sys; sys.version_info = (3, 10, 13); sys.version = '3.10.13 (main)'; exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{lie}" "$2"\n')
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(["make", "demo", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "dix needs Python 3.11 or newer, this is 3.10.13" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("line", ["chat --once hi", "check-cache --turns 1", "cache stats", "cache explain --prompt hi", "cache reset"])
def test_a_program_that_answers_other_json_is_no_bug_of_ours(dix: Dix, line: str) -> None:  # noqa: F811
    for body in ODD_ANSWERS:
        with page_server(200, body) as url:
            ran = dix(*line.split(), "--url", url)
        assert "this is a bug" not in ran.err, (body[:80], ran.err)
        assert ran.code in (0, 2, 4, 5), (body[:80], ran.err)


@pytest.mark.parametrize(
    "event",
    [
        5, [], {"choices": 5}, {"choices": [5]}, {"choices": [{"delta": 5}]}, {"choices": [{"delta": {"content": 5}}]},
        {"choices": [{"delta": {"tool_calls": 5}}]}, {"choices": [{"delta": {"tool_calls": [{"function": 5}]}}]},
        {"choices": [{"delta": {}, "finish_reason": 5}]}, {"choices": [{"logprobs": 5}]}, {"usage": 5},
        {"usage": {"completion_tokens": "x"}},
        {"usage": {"prompt_tokens_details": 5}}, {"usage": {"prompt_tokens_details": {"cached_tokens": "x"}}},
    ],
)  # fmt: skip
def test_an_event_of_another_form_ends_the_stream_with_a_reason(event: Any) -> None:
    with pytest.raises(StreamError):
        StreamState().push(f"data: {json.dumps(event)}")
    StreamState().push('data: {"deepinfer": 5}')  # nobody needs it
