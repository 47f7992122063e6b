"""Every `dix` command line in the help pages, the README and the docs is one that the command line accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from deepinfer_cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tests" / "cli" / "help").glob("*.txt"))]
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
    context = command.make_context("dix", list(words), resilient_parsing=True)
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


def test_command_lines_are_found_and_wrong_ones_refused() -> None:
    assert commands_of("Try `dix stop` or:\n  $ dix start tiny --dp 2 && dix status\n") == [
        "dix stop",
        "dix start tiny --dp 2",
        "dix status",
    ]
    for wrong in ("dix nothing", "dix start --no-such-flag", "dix chat --max-tokens none", "dix bench nothing"):
        with pytest.raises(Exception):  # noqa: B017  (each library class has its own)
            parse(wrong)
