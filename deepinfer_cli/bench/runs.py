"""Run directories: always new, never overwritten, readable after a crash.

`run.json` (status, valid, reasons, command), `config.json`, `environment.json`, `requests.jsonl` (as the generator wrote it),
`requests.parquet`, `chunks.parquet`, `timeline.parquet`, `progress.jsonl`.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from deepinfer_cli.settings import suggest
from hicache.errors import ConfigError

SCHEMA = "dix.run/1"
NAME = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{6}")


def new_run(root: Path, recipe: str) -> Path:
    """A fresh directory `<time>-<recipe>-<id>`; the id says when within its second, in 24 bits."""
    safe = re.sub(r"[^A-Za-z0-9._]+", "-", recipe).strip("-.") or "run"
    while True:
        second, rest_ns = divmod(time.time_ns(), 10**9)
        path = root / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(second))}-{safe}-{(rest_ns << 24) // 10**9:06x}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue  # another one of this moment
        return path


def read_run(path: Path) -> dict[str, Any]:
    """`run.json` of a run directory. Raises: ConfigError when it is not one."""
    try:
        body: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{path} is not a run directory", hint="dix bench run smoke makes one") from None
    return body


def run_paths(root: Path) -> list[Path]:
    """Run directories, oldest first."""
    found = (p for p in root.glob("*") if NAME.fullmatch(p.name) and (p / "run.json").is_file())
    return sorted(found, key=lambda path: (path.name[:15], path.name[-6:]))  # time, and when within the second; not by recipe


def list_runs(root: Path) -> list[dict[str, Any]]:
    """`run.json` of every readable run, oldest first."""
    out = []
    for path in run_paths(root):
        try:
            out.append(read_run(path))
        except ConfigError:
            continue  # cut short by a crash; its raw records are still there
    return out


def _is_running(path: Path) -> bool:
    """Whether a run has not ended, or was killed. An unreadable one counts as ended: who asks for it is told what is wrong with it."""
    try:
        return bool(read_run(path).get("status") == "running")
    except ConfigError:
        return False


def find_runs(root: Path, name: str) -> list[Path]:
    """`last` (that has ended), a run's name or the start of one, a label, a recipe (`smoke`: its last run), or a path.

    Raises: ConfigError when nothing matches.
    """
    if (Path(name) / "run.json").is_file():
        return [Path(name)]
    paths = run_paths(root)
    if name == "last":
        if not paths:
            raise ConfigError("there are no runs yet", hint="dix bench run smoke")
        return [next((path for path in reversed(paths) if not _is_running(path)), paths[-1])]
    if exact := [p for p in paths if p.name == name or (p.name.endswith(f"-{name}") and re.fullmatch(r"[0-9a-f]{6}", name))]:
        return exact
    if labelled := [p for p in paths if name in (read_run(p).get("labels") or {}).values()]:
        return labelled
    if started := [p for p in paths if p.name.startswith(name)]:
        return started
    if same_recipe := [p for p in paths if read_run(p).get("recipe") == name]:
        return same_recipe[-1:]
    raise ConfigError(f"no run {name!r}", hint=suggest(name, [p.name for p in paths], str(root)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole JSON lines of a file; a torn last line is left out."""
    if not path.is_file():
        return []
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:
            continue
    return out
