"""`dix serve`: a model in the foreground. The options and checks here are those of `dix start` too."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import complete
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.options import command
from hicache.errors import ConfigError
from hicache.replay import check_replay

if TYPE_CHECKING:
    from server.plan import ServerPlan

# Where a server differs from the offline engine: arrivals matter more than batch size, and the host cache needs truncation.
SERVER_DEFAULTS = {"engine.prefill_any_interval": 2, "engine.yoco_mode": "compact", "engine.yoco_keep_tokens": 140}
SECTIONS = ("engine", "hicache", "server")
LEAVE_OUT = ("engine.model",)

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", autocompletion=complete.models, help="tiny, a model directory, or a hub id.  [default: tiny]", show_default=False
    ),
]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name for stop, status and logs.  [default: the served name]", show_default=False),
]


def plan_server(call: Invocation, model: str | None, name: str | None) -> ServerPlan:
    """Resolve the model and check what no single section can. Raises: ConfigError."""
    from deepinfer_cli.models import resolve_model
    from server.plan import ServerPlan

    settings = call.settings
    if settings.engine.yoco_mode == "off" and settings.hicache.enabled:
        raise ConfigError(
            "--yoco-keep-tokens 0 turns decoder truncation off, and the host cache needs it",
            hint="add --hicache-size-gb 0, or keep the default --yoco-keep-tokens 140",
        )
    check_replay(settings.hicache.replay, settings.engine.batch_invariant)
    directory, served = resolve_model(call, model)
    server = settings.server if settings.server.served_name else dataclasses.replace(settings.server, served_name=served)
    engine = dataclasses.replace(settings.engine, model=str(directory))
    hicache = settings.hicache
    if server.debug_faults and not call.resolved.given("hicache.audit"):
        # Whoever damages pages on purpose wants each of them found, not a sample.
        hicache = dataclasses.replace(hicache, audit="full")
    return ServerPlan(engine, hicache, server, name or server.served_name, call.paths.state, call.paths.runtime)


def _serve(call: Invocation, model: Model = None, name: Name = None) -> int:
    """Serve a model in the foreground until Ctrl-C.

      dix serve                          the embedded model, no download
      dix serve ~/models/v41             a checkpoint directory
      dix serve tiny --dp 2 --port 8901

    Several hosts: torchrun --nnodes 2 --nproc-per-node 1 ... -m deepinfer_cli serve
    on each of them; --dp counts the ranks of all, every host serves its own over HTTP.

    Next: dix chat, dix check-cache, dix bench run smoke
    """
    from deepinfer_cli.narrator import Narrator
    from server import launcher
    from server.hosts import hosts_from

    plan = dataclasses.replace(plan_server(call, model, name), hosts=hosts_from(os.environ))
    with Narrator(call, plan.local_ranks) as narrator:
        return launcher.serve(plan, narrator)


serve = command(_serve, sections=SECTIONS, defaults=SERVER_DEFAULTS, leave_out=LEAVE_OUT)
