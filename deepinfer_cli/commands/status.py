"""`dix status`: what runs, how busy it is, and what ended without being asked to."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_cli import complete
from deepinfer_cli.api import Api, RequestRefused
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.live import Glance, glance
from deepinfer_cli.options import command
from deepinfer_cli.servers import find_server, read_key
from deepinfer_cli.ui import Column
from deepinfer_cli.units import parse_duration, show_duration, show_number
from server.errors import ServerUnreachable
from server.state import ServerState, is_running, read_state, servers_dir

COLUMNS = [
    Column("NAME", right=False, role="accent"),
    Column("STATE", right=False),
    Column("UP", right=False),
    Column("URL", right=False),
    *(Column(head) for head in ("RANKS", "RUNNING", "WAITING", "DEVICE KV", "HOST KV", "HIT RATE", "TOK/S")),
    Column("NOTE", right=False),
]


@dataclass(frozen=True, slots=True)
class Line:
    """One server: its record and, when it answers, its counters."""

    state: ServerState
    running: bool
    seen: Glance | None


def _status(
    call: Invocation,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", autocompletion=complete.servers, help="Show this server only.  [default: all]", show_default=False),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing; Ctrl-C ends it.")] = False,
    interval: Annotated[str, typer.Option("--interval", metavar="TIME", help="Time between two looks.")] = "1s",
) -> int:
    """Show what is running.

      dix status
      dix status --watch --json | jq .

    Next: dix logs, dix stop
    """
    interval_s = parse_duration(interval, "--interval")
    if not watch:
        lines = collect(call, name, {})
        show(call, lines)
        return ExitCode.OK if name is None or any(line.running for line in lines) else ExitCode.UNREACHABLE
    with contextlib.suppress(KeyboardInterrupt):
        follow(call, name, interval_s)
    return ExitCode.OK


def collect(call: Invocation, name: str | None, before: dict[str, Glance]) -> list[Line]:
    """Every recorded server, or the named one. Raises: ServerUnreachable when the name is not known at all."""
    recorded = [read_state(path.parent) for path in sorted(servers_dir(call.paths.state).glob("*/state.json"))]
    states = [state for state in recorded if state is not None and name in (None, state.name)]
    if name is not None and not states:
        find_server(call, name)
    return [_line(call, state, before) for state in states]


def _line(call: Invocation, state: ServerState, before: dict[str, Glance]) -> Line:
    running = is_running(state)
    seen = None
    if running:
        api = Api(state.base_url, read_key(call), timeout_s=2.0)
        try:
            seen = glance(api, before.get(state.name))
            before[state.name] = seen
        except (ServerUnreachable, RequestRefused):
            seen = None  # starting, or hung: the recorded state and the empty cells say so
        finally:
            api.close()
    return Line(state, running, seen)


def show(call: Invocation, lines: list[Line]) -> None:
    if call.json:
        call.ui.document("dix.status/1", {"servers": [plain(line) for line in lines]})
    elif lines:
        call.ui.table(COLUMNS, [cells(line) for line in lines])
    else:
        call.ui.print("nothing is running")
        call.ui.note("dix start starts the embedded model", "quiet")


def follow(call: Invocation, name: str | None, interval_s: float) -> None:
    before: dict[str, Glance] = {}
    if call.json or not call.ui.stdout.isatty():
        while True:
            lines = collect(call, name, before)
            if not lines and not call.json:
                call.ui.print("nothing is running")
            for line in lines:
                if call.json:
                    call.ui.event("status", **plain(line))
                else:
                    call.ui.print("  ".join(str(cell) for cell in cells(line) if cell not in (None, "")))
            time.sleep(interval_s)
    with call.ui.watch(interval_s) as region:
        while True:
            rows = [cells(line) for line in collect(call, name, before)]
            region.update(call.ui.build_table(COLUMNS, rows, call.ui.out.width))
            time.sleep(interval_s)


def cells(line: Line) -> tuple[Any, ...]:
    state, seen = line.state, line.seen
    ranks = sum(1 for p in state.processes if p.role == "rank")
    if not line.running:
        note = "ended without stop" + (f"; before: {state.last_failure}" if state.last_failure else "")
        return (state.name, "stopped", None, None, ranks, None, None, None, None, None, None, f"{note} → dix logs {state.name}")
    up_s = _up_s(state)
    up = None if up_s is None else show_duration(up_s)
    word = state.state if state.state != "ready" else (seen.state if seen else "not answering")
    note = f"restarted {state.restarts}×: {state.last_failure}" if state.restarts else state.last_failure
    if seen is None:
        return (state.name, word, up, state.base_url, ranks, None, None, None, None, None, None, note)
    return (
        state.name, word, up, state.base_url, ranks, seen.running, seen.waiting,
        _percent(seen.device_kv), _percent(seen.host_kv), _percent(seen.hit_share), show_number(seen.tok_s, 1), note,
    )  # fmt: skip


def _up_s(state: ServerState) -> float | None:
    """Seconds since the supervisor was forked, by the clock that nobody sets; None when it is gone."""
    with contextlib.suppress(OSError, IndexError):
        since_boot_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, since_boot_s - int(state.supervisor.start_time) / os.sysconf("SC_CLK_TCK"))
    return None


def plain(line: Line) -> dict[str, Any]:
    """The same facts for JSON, in base units."""
    state, seen = line.state, line.seen
    return {
        "name": state.name,
        "state": cells(line)[1],
        "url": state.base_url,
        "model": state.served_name or state.model,
        "pid": state.supervisor.pid,
        "ranks": [{"rank": p.rank, "pid": p.pid} for p in state.processes if p.role == "rank"],
        "up_s": _up_s(state) if line.running else None,
        "restarts": state.restarts,
        "last_failure": state.last_failure or None,
        "running": seen.running if seen else None,
        "waiting": seen.waiting if seen else None,
        "device_kv": seen.device_kv if seen else None,
        "host_kv": seen.host_kv if seen else None,
        "hit_rate": seen.hit_share if seen else None,
        "tok_s": seen.tok_s if seen else None,
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


status = command(_status)
