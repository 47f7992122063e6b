"""`dix logs`: the logs of one server's processes, merged by time."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_cli import complete
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import command
from deepinfer_cli.settings import suggest
from hicache.errors import ConfigError
from server.errors import ServerUnreachable
from server.logs import KEPT_FILES
from server.state import list_servers, read_state, server_dir, servers_dir

LEVELS = ("debug", "info", "warning", "error")
ROLES = {"warning": "warning", "error": "bad", "debug": "quiet"}
POLL_S = 0.25
TAIL_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. `time` sorts as text; lines that are not JSON keep their text and count as info."""

    time: str
    level: str
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """How far a log file has been read."""

    inode: int
    offset: int


def _logs(
    call: Invocation,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", autocompletion=complete.servers, help="Server.  [default: the only or last one]", show_default=False
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing; Ctrl-C ends it.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="Lines to show first.")] = 50,
    level: Annotated[str, typer.Option("--level", metavar="|".join(LEVELS), help="Least severe lines to show.")] = "info",
) -> int:
    """Show a server's log, running or not.

      dix logs
      dix logs tiny --follow --level warning

    Next: dix status
    """
    if level not in LEVELS:
        raise ConfigError(f"--level is {level!r}", hint=f"one of: {', '.join(LEVELS)}")
    folder = log_folder(call, name)
    offsets: dict[Path, Place] = {}
    wanted = [line for line in read_new(folder, offsets) if keeps(line, level)]
    for line in wanted[len(wanted) - lines :] if lines else []:
        emit(call, line)
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            for line in read_new(folder, offsets):
                if keeps(line, level):
                    emit(call, line)
            time.sleep(POLL_S)
    return ExitCode.OK


def log_folder(call: Invocation, name: str | None) -> Path:
    """Where the named server logs; without a name the running one, else the one that logged last."""
    known = sorted(p.name for p in servers_dir(call.paths.state).glob("*") if (p / "logs").is_dir())
    if name is None:
        running = list_servers(call.paths.state)
        if len(running) > 1:
            raise ConfigError(f"{len(running)} servers are running", hint=f"name one of: {', '.join(s.name for s in running)}")
        if not running and not known:
            raise ServerUnreachable("no server has run here yet", hint="dix start starts one")
        name = running[0].name if running else max(known, key=lambda n: (servers_dir(call.paths.state) / n / "logs").stat().st_mtime)
    folder = server_dir(call.paths.state, name)
    state = read_state(folder)
    logs = Path(state.log_dir) if state is not None and state.log_dir else folder / "logs"
    if not logs.is_dir():
        raise ServerUnreachable(f"no server named {name!r} has run here", hint=suggest(name, known, "dix status"))
    return logs


def read_new(folder: Path, places: dict[Path, Place]) -> list[LogLine]:
    """Whole lines that came since the last call, all processes together in the order of time. A file that was rotated meanwhile is read to
    its end under its new name first.
    """
    out: list[LogLine] = []
    for path in sorted(folder.glob("*.log")):
        try:
            parts, places[path] = _unread(path, places.get(path))
        except FileNotFoundError:
            continue  # between its old and its new name: the next call finds both
        for data in parts:
            out += parse_lines(data.decode("utf-8", "replace"), path.stem)
    return sorted(out, key=lambda line: line.time)


def _unread(path: Path, place: Place | None) -> tuple[list[bytes], Place]:
    """(whole lines of rotated files behind `place`, oldest first, then those of the file itself; where to go on)."""
    parts = []
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        start = max(0, stat.st_size - TAIL_BYTES) if place is None else 0
        if place is not None and place.inode == stat.st_ino and place.offset <= stat.st_size:
            start = place.offset
        elif place is not None:
            parts += _rotated(path, place)
        file.seek(start)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return [*parts, data[:end]], Place(stat.st_ino, start + end)


def _rotated(path: Path, place: Place) -> list[bytes]:
    """What came behind `place` in files that were rotated away since; nothing when that file is gone."""
    parts: list[bytes] = []
    for number in range(1, KEPT_FILES + 1):
        try:
            with path.with_name(f"{path.name}.{number}").open("rb") as file:
                if os.fstat(file.fileno()).st_ino == place.inode:
                    file.seek(place.offset)
                    return [file.read(), *parts]
                parts.insert(0, file.read())
        except FileNotFoundError:
            break
    return []


def parse_lines(text: str, source: str) -> Iterator[LogLine]:
    """Lines of one file. A line without a time of its own (a traceback) stays behind the one before it."""
    last = ""
    for raw in text.splitlines():
        try:
            event = json.loads(raw)
            last = str(event.get("time", last))
            yield LogLine(
                last, str(event.get("level", "info")).lower(), str(event.get("source", event.get("process", source))), _message(event)
            )
        except (ValueError, AttributeError):
            words = raw.split(maxsplit=3)
            if words and words[0][:4].isdigit():
                last = words[0]
            level = next((w.lower().rstrip(":") for w in words[:3] if w.lower().rstrip(":") in LEVELS), "info")
            yield LogLine(last, level, source, raw)


def _message(event: dict[str, object]) -> str:
    rest = {k: v for k, v in event.items() if k not in ("time", "level", "source", "process", "message", "event")}
    extra = "  ".join(f"{k}={v}" for k, v in rest.items() if v not in (None, ""))
    return f"{event.get('message', event.get('event', ''))}  {extra}".strip()


def keeps(line: LogLine, level: str) -> bool:
    return line.level not in LEVELS or LEVELS.index(line.level) >= LEVELS.index(level)


def emit(call: Invocation, line: LogLine) -> None:
    if call.json:
        call.ui.event("log", time=line.time, level=line.level, source=line.source, message=line.text)
    elif line.text.startswith(line.time) and line.time:
        call.ui.print(f"{line.source:<10} {line.text}", ROLES.get(line.level, ""))
    else:
        call.ui.print(f"{line.time} {line.level:<7} {line.source:<10} {line.text}".lstrip(), ROLES.get(line.level, ""))


logs = command(_logs)
