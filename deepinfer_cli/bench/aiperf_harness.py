"""Where the load harness is installed and which version it is."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hicache.errors import MachineError

PINNED = "0.13.0"
FORK_PACKAGE, FORK_VERSION = "agentx-harness", "1.0.12"


@dataclass(frozen=True, slots=True)
class Harness:
    """A program and what it is."""

    name: str
    version: str
    program: Path


def find_harness(name: str, cache: Path) -> Harness:
    """The pinned harness beside us, or the fork in its own environment. Raises: MachineError with the line that installs it."""
    return _find_fork(cache) if name == "fork" else _find_aiperf()


def _find_aiperf() -> Harness:
    program = _program()
    try:
        # The package's metadata: the fork's program prints the same name.
        version = metadata.version("aiperf")
    except metadata.PackageNotFoundError:
        version = ""
    if not version or program is None:
        raise MachineError("the load harness aiperf is not installed", hint=f"pip install aiperf=={PINNED}, or pip install 'dix[bench]'")
    if version != PINNED:
        raise MachineError(
            f"aiperf {version} is installed, its flags and files are known for {PINNED}", hint=f"pip install aiperf=={PINNED}"
        )
    return Harness("aiperf", version, program)


def _program() -> Path | None:
    """Beside our interpreter, else on the path: packages installed with `--target` keep their programs elsewhere."""
    beside = Path(sys.executable).with_name("aiperf")
    found = str(beside) if beside.exists() else shutil.which("aiperf")
    return Path(found) if found else None


def fork_environment(cache: Path) -> Path:
    return cache / "harness" / f"{FORK_PACKAGE}-{FORK_VERSION}"


def _find_fork(cache: Path) -> Harness:
    folder = fork_environment(cache)
    program = folder / "bin" / "agentx"
    found = [
        re.sub(r".*-([\d.]+)\.dist-info$", r"\1", p.name) for p in folder.glob("lib/python3*/site-packages/agentx_harness-*.dist-info")
    ]
    if not program.exists() or not found:
        # It ships the same import package as aiperf, so it cannot live beside it.
        install = f"python -m venv {folder} && {folder}/bin/pip install {FORK_PACKAGE}=={FORK_VERSION}"
        raise MachineError(f"the harness {FORK_PACKAGE} is not installed", hint=install)
    return Harness("fork", found[0], program)
