"""Where nothing has been compiled yet a server begins with eager steps, many times slower: nothing is measured before that ends."""

from __future__ import annotations

import time

from deepinfer_cli.api import Api, RequestRefused
from deepinfer_cli.ui import Ui

PATIENCE_S, LOOK_S = 600.0, 1.0


def await_compiled(api: Api, ui: Ui, patience_s: float = PATIENCE_S, look_s: float = LOOK_S) -> None:
    """Wait while a rank builds its compiled steps, and say so. Servers that report nothing of the kind are not waited for.

    Raises: ServerUnreachable.
    """
    if not _compiling(api):
        return
    ui.note("the server's steps are being compiled, once per machine: measuring begins when they are", "quiet")
    give_up_s = time.monotonic() + patience_s
    while _compiling(api):
        if time.monotonic() > give_up_s:
            ui.warn(f"still compiling after {patience_s:g} s: what is measured now are eager steps")
            return
        time.sleep(look_s)


def _compiling(api: Api) -> bool:
    try:
        metrics = api.get("/deepinfer/metrics")
    except (RequestRefused, ValueError):
        return False
    ranks = metrics.get("ranks") if isinstance(metrics, dict) else None
    return any(rank.get("compiling") for rank in ranks or [] if isinstance(rank, dict))
