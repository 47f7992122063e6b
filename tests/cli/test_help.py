"""The help of every command is a snapshot in `tests/cli/help`. Write it anew with `python -m tests.cli.test_help`."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from pathlib import Path
from unittest import mock

import pytest

import deepinfer_cli.main
from deepinfer_cli.app import COMMANDS, main

FOLDER = Path(__file__).parent / "help"
SHIPPED = Path(deepinfer_cli.main.__file__).with_name("help.txt")


def command_lines() -> list[tuple[str, ...]]:
    """Every command and every command of every group."""
    out: list[tuple[str, ...]] = [()]
    for name, entry in COMMANDS.items():
        out.append((name,))
        if entry.group:
            module, _, attribute = entry.target.partition(":")
            out += [(name, inner) for inner in getattr(importlib.import_module(module), attribute)]
    return out


def help_text(words: tuple[str, ...]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.dict(os.environ, {"COLUMNS": "100"}):
        assert main([*words, "--help"]) == 0
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


def path_of(words: tuple[str, ...]) -> Path:
    return FOLDER / f"{'-'.join(('dix', *words))}.txt"


@pytest.mark.parametrize("words", command_lines(), ids=lambda words: "-".join(words) or "dix")
def test_help_is_the_recorded_page(words: tuple[str, ...]) -> None:
    assert help_text(words) == path_of(words).read_text(encoding="utf-8")


def test_the_page_that_is_answered_at_once_is_the_same() -> None:
    assert SHIPPED.read_text(encoding="utf-8") == help_text(())


def test_no_page_is_left_of_a_command_that_is_gone() -> None:
    assert {path.name for path in FOLDER.glob("*.txt")} == {path_of(words).name for words in command_lines()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for words in command_lines():
        path_of(words).write_text(help_text(words), encoding="utf-8")
    SHIPPED.write_text(help_text(()), encoding="utf-8")
