"""`dix` alone: what is running, the last runs, and three next commands."""

from __future__ import annotations

from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Shared, prepare
from deepinfer_cli.ui import Column
from server.state import list_servers

NEXT = [
    ("talk", "dix chat tiny", "built in, no download: every block of the architecture at toy width"),
    ("serve", "dix serve tiny", "then open http://127.0.0.1:8888"),
    ("measure", "dix bench run smoke && dix report", "needs a server: dix start"),
]
NEXT_TO_A_SERVER = [
    ("talk", "dix chat", "or open the address in a browser"),
    ("measure", "dix bench run smoke && dix report", "a short run and its report"),
    ("stop", "dix stop", "end the server and everything it started"),
]


def overview() -> int:
    """Print the overview. Never fails because of what it looks at."""
    from deepinfer_cli.app import version_text
    from deepinfer_cli.bench.runs import list_runs
    from deepinfer_cli.doctor import describe_device

    call = prepare(Shared(), {}, {})
    running = list_servers(call.paths.state)
    names = ", ".join(f"{s.name} at {s.base_url}" for s in running)
    call.ui.print(f"dix {version_text()} · {describe_device()} · {names or 'nothing running'}", prose=True)
    for run in list_runs(call.paths.runs)[-3:]:
        mark = "" if run.get("valid") else " · not valid"
        call.ui.print(f"  run      {run.get('id')}  {run.get('status')}{mark}", "quiet")
    call.ui.table(
        [Column("", right=False), Column("", right=False, role="accent"), Column("", right=False)],
        [(f"  {a}", b, c) for a, b, c in (NEXT_TO_A_SERVER if running else NEXT)],
    )
    return ExitCode.OK
