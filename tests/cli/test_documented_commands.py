"""Every `dix` command line in the help pages, the README and the docs is accepted, and the cheap ones do what they are there for.

Cheap ones run against the server for tests. For every other one it is said which test runs it.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from deepinfer_cli.app import app
from tests.cli.fake_server import FakeServer, serving
from tests.cli.test_report import four_requests, make_run
from tests.cli.test_talk import record_server

ROOT = Path(__file__).resolve().parents[2]
# docs/robustness.md lists mistakes; tests/robustness makes them.
DOCS = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "robustness.md")]
PAGES = [*DOCS, *sorted((ROOT / "tests" / "cli" / "help").glob("*.txt"))]
# What runs here, by its beginning.
CHEAP = (
    "dix status", "dix config", "dix bench list", "dix bench run smoke", "dix cache stats", "dix cache reset",
    "dix cache explain body.json", "dix chat --once", "dix chat tiny", "dix check-cache", "dix report", "dix logs", "dix render",
    "dix model info tiny", "dix model make-tiny", "dix help",
)  # fmt: skip
RUNS = {"OLD": "20260101-000000-smoke-aaaaaa", "NEW": "20260102-000000-smoke-bbbbbb"}
# What loads a model in this process: slow tests here.
LOADS = ("dix generate", "dix model verify tests/golden/model")
# What starts processes, needs a GPU or takes minutes: the test that does the same.
ELSEWHERE = {
    "dix --install-completion": "tests/cli/test_completion.py",
    "dix serve": "tests/e2e/test_processes.py",
    "dix start": "tests/e2e/conftest.py",
    "dix stop": "tests/e2e/test_killed_ranks.py",
    "dix doctor": "tests/cli/test_errors.py",
    "dix check-cache --programme": "tests/cli/test_cache_programme.py",
    "dix cache explain": "tests/cli/test_cache.py",
    "dix model shapes": "tests/e2e/test_random_weights.py",
    "dix model info DIR": "tests/e2e/test_checkpoints.py",
    "dix model verify DIR": "tests/cli/test_documented_commands.py",
    "dix model eval": "tests/cli/test_scoring.py",
    "dix tune prefill-interval": "tests/cli/test_tune.py",
    "dix tune draft-confidence": "tests/cli/test_tune_drafts.py",
    "dix bench run FILE": "tests/cli/test_load.py",
    "dix bench run smoke --url http://other:8000": "tests/cli/test_load.py",
    "dix bench sweep": "tests/cli/test_sweep.py",
    "dix bench engine": "tests/cli/test_bench_engine.py",
    "dix bench kernels": "tests/cli/opbench/test_records.py",
    "dix bench layers": "tests/cli/opbench/test_records.py",
    "dix bench agentx": "tests/cli/bench/test_agentx_e2e.py",
}
_INLINE = re.compile(r"`(dix [^`\n]+)`")
_LINE = re.compile(r"^\s*(?:\$ )?(?:git diff \| )?(dix [a-z].*?)(?:\s{2,}.*|\s+#.*)?$", re.MULTILINE)


def commands_of(text: str) -> list[str]:
    """Command lines, shell operators split off. Usage lines with brackets are grammar, not examples."""
    found = [*_INLINE.findall(text), *(line for line in _LINE.findall(text) if not line.startswith("dix serves"))]
    parts = [part.strip() for line in found for part in re.split(r"&&|\|\||\s\|\s|\s>\s|;|·|, (?=dix )", line)]
    return [part for part in parts if part.startswith("dix ") and "[" not in part and "…" not in part]


def parse(line: str) -> None:
    """Raises what the command line raises: unknown command or option, missing argument, bad value."""
    command: Any = get_command(app)
    words = shlex.split(line)[1:]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    context = command.make_context("dix", list(words), resilient_parsing=True)
    if words[0].startswith("-"):  # parsing the program's own options would carry them out
        assert words[0] in {name for parameter in command.get_params(context) for name in parameter.opts}, words[0]
        return
    while hasattr(command, "get_command") and words:
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name!r}"
        command = found
        if hasattr(command, "get_command"):
            context = command.make_context(name, list(words), parent=context, resilient_parsing=True)
    if words[:1] != ["--help"]:
        command.make_context(command.name, list(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_of_a_page_is_accepted(page: Path) -> None:
    for line in commands_of(page.read_text(encoding="utf-8")):
        try:
            parse(line)
        except Exception as error:
            raise AssertionError(f"{page.name}: {line}: {error}") from error


def all_lines() -> list[str]:
    return sorted({line for page in PAGES for line in commands_of(page.read_text(encoding="utf-8"))})


def where_run(line: str) -> str:
    """`here`, `here, slow`, or the test that runs a line: the longest beginning decides. An assertion fails when nothing runs it."""
    places = {**dict.fromkeys(CHEAP, "here"), **dict.fromkeys(LOADS, "here, slow"), **ELSEWHERE}
    begins = [begin for begin in places if line.startswith(begin)]
    assert begins, f"no test runs {line}"
    return places[max(begins, key=len)]


def lines_run(place: str) -> list[str]:
    return [line for line in all_lines() if where_run(line) == place]


def test_the_tests_that_run_the_other_lines_exist() -> None:
    for begin, test in ELSEWHERE.items():
        words = begin.split()
        asked = words[2] if words[1] in ("bench", "tune") else words[1]
        text = (ROOT / test).read_text(encoding="utf-8")
        assert re.search(rf"\b{asked.replace('-', '.')}|dix|main\(", text), f"{test} runs no {begin}"


@pytest.fixture
def server(home: Path, tmp_path: Path) -> Iterator[FakeServer]:
    """The one running server, two runs, and the files that examples name."""
    log = home / "state" / "servers" / "tiny" / "logs"
    for run in RUNS.values():
        make_run(home, run, four_requests())
    (tmp_path / "body.json").write_text(json.dumps({"messages": [{"role": "user", "content": "a b c"}]}))
    with serving() as running:
        record_server(home, "tiny", running.port)
        log.mkdir()
        (log / "rank-0.log").write_text(json.dumps({"ts_unix": "10", "level": "info", "msg": "ready"}) + "\n")
        yield running


@pytest.mark.parametrize("line", lines_run("here"))
def test_a_cheap_line_does_what_it_is_there_for(
    line: str, dix: Callable[..., Any], server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    for example, real in {**RUNS, "8901": str(server.port)}.items():
        line = line.replace(example, real)
    ran = dix(*shlex.split(line)[1:])
    assert ran.code == 0, ran.err
    assert ran.out.strip() or ran.err.strip()


@pytest.fixture(scope="module")
def compiled_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that all lines share, so that the compiled CPU step is built once and not once a line, one build beside the next."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("line", lines_run("here, slow"))
def test_a_line_that_loads_a_model_does_what_it_is_there_for(
    line: str, dix: Callable[..., Any], compiled_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIX_HOME", str(compiled_home))
    monkeypatch.chdir(ROOT)
    ran = dix(*shlex.split(line)[1:])
    assert ran.code == 0, ran.err
    assert ran.out.strip()


def test_command_lines_are_found_and_wrong_ones_refused() -> None:
    assert commands_of("Try `dix stop` or:\n  $ dix start tiny --dp 2 && dix status\n") == [
        "dix stop",
        "dix start tiny --dp 2",
        "dix status",
    ]
    for wrong in ("dix nothing", "dix start --no-such-flag", "dix chat --max-tokens none", "dix bench nothing"):
        with pytest.raises(Exception):  # noqa: B017  (each library class has its own)
            parse(wrong)
