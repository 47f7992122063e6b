"""Shows how a server starts, serves and stops, from the launcher's events: one line per stage, a bar for weights."""

from __future__ import annotations

import contextlib
from typing import Any

from deepinfer_cli.invocation import Invocation
from deepinfer_cli.ui import Bar

# Facts that every event carries; a reader of the screen has them already.
COMMON = ("event", "time", "elapsed_s", "pid")


class Narrator:
    """Call it with each event; use it as a context so that its bar is taken away whatever happens."""

    def __init__(self, call: Invocation, ranks: int) -> None:
        self._call, self._ranks = call, ranks
        self._shares: dict[int, float] = {}
        self._ready: set[int] = set()
        self._bar: Bar | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Narrator:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_bar()

    def __call__(self, event: dict[str, Any]) -> None:
        kind = str(event.get("event", "event"))
        if self._call.json:
            self._call.ui.event(kind, **{k: v for k, v in event.items() if k != "event"})
            return
        tell = getattr(self, f"_on_{kind}", None)
        if tell is not None:
            tell(event)
        else:
            facts = "  ".join(f"{k} {v}" for k, v in event.items() if k not in COMMON and v not in (None, "", [], {}))
            self._line(kind.replace("_", " "), facts, event)

    def _line(self, name: str, text: str, event: dict[str, Any], *, done: bool = True) -> None:
        elapsed = event.get("elapsed_s")
        self._call.ui.step(name, text, done=done, took_s=float(elapsed) if elapsed is not None else None)

    def _on_bound(self, event: dict[str, Any]) -> None:
        self._line("port", f"{event.get('host')}:{event.get('port')}", event)

    def _on_progress(self, event: dict[str, Any]) -> None:
        if self._bar is None:
            self._bar = self._open.enter_context(self._call.ui.progress(str(event.get("stage", "loading")), 1.0))
        self._shares[int(event.get("rank", 0))] = float(event.get("fraction", 0.0))
        share = sum(self._shares.values()) / max(self._ranks, len(self._shares))
        self._bar.update(share, f"{self._ranks} ranks" if self._ranks > 1 else "")

    def _on_rank_ready(self, event: dict[str, Any]) -> None:
        self._ready.add(int(event.get("rank", 0)))
        if len(self._ready) < self._ranks:
            return
        self._close_bar()
        limits = event.get("limits") or {}
        facts = [f"{self._ranks} rank{'s' if self._ranks > 1 else ''}"]
        if limits:
            tokens = int(limits.get("num_blocks", 1) - 1) * int(limits.get("block_size", 0))
            facts += [
                f"{limits.get('device')}, profile {limits.get('precision')}",
                f"context {limits.get('max_model_len', 0):,}",
                f"cache {tokens:,} tokens",
            ]
        self._line("model", " · ".join(facts), event)

    def _on_ready(self, event: dict[str, Any]) -> None:
        self._close_bar()
        self._ready.clear()
        self._line("ready", str(event.get("url", "")), event)

    def _on_warning(self, event: dict[str, Any]) -> None:
        hint = f" ({event['hint']})" if event.get("hint") else ""
        self._call.ui.warn(f"{event.get('message')}{hint}")

    def _on_failure(self, event: dict[str, Any]) -> None:
        self._close_bar()
        if event.get("restarting"):  # else the error boundary prints it
            self._call.ui.warn(f"{event.get('message')}; starting again")

    def _on_log_tail(self, event: dict[str, Any]) -> None:
        if self._call.ui.options.verbose:
            for line in event.get("lines", []):
                self._call.ui.note(f"  {line}", "quiet")

    def _on_error(self, event: dict[str, Any]) -> None:
        self._close_bar()  # the exception that follows is printed by the error boundary

    def _close_bar(self) -> None:
        self._open.close()
        self._bar = None
        self._shares.clear()
