"""`dix cache stats`: the prefix cache's counters, per rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.lazy import Lazy
from deepinfer_cli.live import checksum_errors, host_share
from deepinfer_cli.options import command
from deepinfer_cli.servers import connect
from deepinfer_cli.ui import Column

COUNTERS = {
    "LOOKUPS": "lookups_total",
    "LOOKED UP tok": "lookup_tokens_total",
    "HITS": "hits_total",
    "HIT tok": "hit_tokens_total",
    "STORED tok": "store_tokens_total",
    "EVICTED tok": "evicted_tokens_total",
}


def _stats(
    call: Invocation,
    port: Annotated[int | None, typer.Option("--port", metavar="P", help="Port on this machine.  [default: the running server's]")] = None,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="Server somewhere else.")] = None,
) -> int:
    """Show the prefix cache's live counters, per rank.

      dix cache stats

    Next: dix check-cache
    """
    api = connect(call, port, url)
    metrics = api.get("/deepinfer/metrics")
    ranks = metrics.get("ranks") or []
    if call.json:
        caches = [{"rank": rank.get("rank"), **(rank.get("prefix_cache") or {})} for rank in ranks]
        totals = (metrics.get("totals") or {}).get("prefix_cache") or {}
        call.ui.document("dix.cache/1", {"url": api.url, "ranks": caches, "totals": totals, "checksum_errors": checksum_errors(metrics)})
        return ExitCode.OK
    rows = [row(str(rank.get("rank")), rank.get("prefix_cache") or {}, host_share([rank])) for rank in ranks]
    if len(ranks) > 1:
        rows.append(row("all", (metrics.get("totals") or {}).get("prefix_cache") or {}, host_share(ranks)))
    call.ui.table([Column("RANK"), *(Column(head) for head in COUNTERS), Column("HIT RATE"), Column("ARENA USED")], rows)
    if errors := checksum_errors(metrics):
        call.ui.warn(f"{errors} stored pages did not match their checksum and were dropped")
    if not any((rank.get("prefix_cache") or {}).get("lookups_total") for rank in ranks):
        call.ui.note("no lookups yet: the cache is off, or nothing was asked", "quiet")
    return ExitCode.OK


def row(name: str, cache: Mapping[str, Any], used: float | None) -> list[Any]:
    looked, hit = cache.get("lookup_tokens_total", 0), cache.get("hit_tokens_total", 0)
    cells: list[Any] = [name, *(f"{cache[key]:,.0f}" if key in cache else None for key in COUNTERS.values())]
    return [*cells, f"{hit / looked:.1%}" if looked else None, f"{used:.0%}" if used is not None else None]


stats = command(_stats)
TABLE = {"stats": Lazy("deepinfer_cli.commands.cache:stats", "Show live counters per rank.")}
