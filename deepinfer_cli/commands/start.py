"""`dix start`: the same server as `dix serve`, in the background."""

from __future__ import annotations

import dataclasses
import time

from deepinfer_cli.commands.serve import LEAVE_OUT, SECTIONS, SERVER_DEFAULTS, Model, Name, plan_server
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import command


def _start(call: Invocation, model: Model = None, name: Name = None) -> int:
    """Serve a model in the background; returns when one token was generated.

      dix start
      dix start tiny --dp 2 --port 8901 --name demo

    Next: dix chat, dix status, dix stop
    """
    plan = plan_server(call, model, name)
    from deepinfer_cli.narrator import Narrator
    from server import launcher

    started_s = time.monotonic()
    with Narrator(call, plan.local_ranks) as narrator:
        state = launcher.start(plan, narrator)
    if call.json:
        call.ui.document("dix.server/1", {**dataclasses.asdict(state), "url": state.base_url})
        return ExitCode.OK
    call.ui.print(f"{state.name} is ready at {state.base_url} after {time.monotonic() - started_s:.1f} s")
    call.ui.note("next: dix chat · dix check-cache · dix stop", "quiet")
    return ExitCode.OK


start = command(_start, sections=SECTIONS, defaults=SERVER_DEFAULTS, leave_out=LEAVE_OUT)
