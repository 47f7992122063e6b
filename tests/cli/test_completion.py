"""Completion in the shells themselves where they are installed, and in the words that their scripts exchange with `dix`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path: Path, home: Path) -> dict[str, str]:
    """`dix` on the path, an empty home, and one server that has run."""
    program = tmp_path / "bin" / "dix"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from deepinfer_cli.main import run; run()" "$@"\n')
    program.chmod(0o755)
    (home / "state" / "servers" / "demo").mkdir(parents=True)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(tmp_path), "DIX_HOME": str(home), "PYTHONPATH": str(ROOT)}


def answer(environment: dict[str, str], *command: str, **more: str) -> str:
    done = subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_that_it_can_read(shell: str, environment: dict[str, str], tmp_path: Path) -> None:
    script = answer(environment, "dix", _DIX_COMPLETE=f"source_{shell}")
    assert f"_DIX_COMPLETE=complete_{shell}" in script
    if program := shutil.which(shell):
        file = tmp_path / "script"
        file.write_text(script)
        subprocess.run([program, "-n", str(file)], check=True, timeout=30)


@pytest.mark.parametrize(("words", "wanted"), [("dix sto", "stop"), ("dix stop de", "demo"), ("dix serve --d", "--dp")])
def test_each_shell_is_told_the_same_names(words: str, wanted: str, environment: dict[str, str]) -> None:
    last = str(len(words.split()) - 1)
    assert wanted in answer(environment, "dix", _DIX_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last).split()
    assert f'"{wanted}"' in answer(environment, "dix", _DIX_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=words)
    fish = {"_DIX_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert wanted in answer(environment, "dix", **fish).split()


def test_bash_completes_after_installation(environment: dict[str, str], tmp_path: Path) -> None:
    """Installed by the command itself into an empty home; a new shell then fills in the word."""
    assert "bash completion installed" in answer(environment, "bash", "--norc", "-c", "dix --install-completion; :")
    ask = 'COMP_WORDS=(dix stat); COMP_CWORD=1; _dix_completion dix; echo "${COMPREPLY[@]}"'
    assert answer(environment, "bash", "--norc", "-c", f"source {tmp_path}/.bash_completions/dix.sh; {ask}").split() == ["status"]
