"""A home of its own for every test, and `dix` as a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.bench import harness
from deepinfer_cli.main import main


@dataclass(frozen=True)
class Ran:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No file and no variable of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith(("DIX_", "DEEPINFER_", "NO_COLOR", "FORCE_COLOR", "COLUMNS")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DIX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(harness, "COUNTERS_AGE_S", 0.05)  # the stand-in server counts at once; only real ones lag behind
    return tmp_path / "home"


@pytest.fixture
def dix(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command line in this process."""

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
