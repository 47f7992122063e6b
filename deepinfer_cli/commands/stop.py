"""`dix stop`: drain, end the whole process group, and say what was left."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from deepinfer_cli import complete
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import command
from deepinfer_cli.servers import find_server
from deepinfer_cli.units import parse_duration


def _stop(
    call: Invocation,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", autocompletion=complete.servers, help="Server to stop.  [default: the only one]", show_default=False
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Stop every server.")] = False,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="Wait this long for running requests.  [default: 30s]", show_default=False)
    ] = "",
    keep_cache: Annotated[bool, typer.Option("--keep-cache", help="Leave the prefix cache to the next start of this server.")] = False,
) -> int:
    """Stop a background server and everything it started.

      dix stop
      dix stop --all --grace 5s

    Next: dix status
    """
    from server import launcher
    from server.state import list_servers, servers_dir

    grace_s = parse_duration(grace, "--grace") if grace else call.settings.server.grace_s
    if all_:
        names = [state.name for state in list_servers(call.paths.state)]
    elif name is not None and (servers_dir(call.paths.state) / name).is_dir():
        # A dead supervisor may have left ranks behind: stop cleans those as well.
        names = [name]
    else:
        names = [find_server(call, name).name]
    reports = [launcher.stop(each, call.paths.state, grace_s, keep_cache=keep_cache) for each in names]
    if call.json:
        call.ui.document("dix.stopped/1", {"servers": [_plain(report) for report in reports]})
        return ExitCode.OK
    for each, report in zip(names, reports, strict=True):
        details = " · ".join(
            f"{key} {value}" for key, value in _plain(report).items() if key not in ("name",) and value not in (None, [], "", ())
        )
        call.ui.print(f"stopped {each}" + (f" ({details})" if details and call.ui.options.verbose else ""))
    if not names:
        call.ui.note("nothing is running")
    return ExitCode.OK


def _plain(report: Any) -> dict[str, Any]:
    return dataclasses.asdict(report) if dataclasses.is_dataclass(report) and not isinstance(report, type) else dict(report or {})


stop = command(_stop)
