"""`dix cache stats` and `dix cache reset`: the prefix cache's counters, per rank, and a fresh start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from deepinfer_cli.api import Api
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.lazy import Lazy
from deepinfer_cli.live import checksum_errors, host_share
from deepinfer_cli.options import Port, Url, command
from deepinfer_cli.servers import connect
from deepinfer_cli.ui import Column
from deepinfer_cli.units import parse_duration

COUNTERS = {
    "LOOKUPS": "lookups_total",
    "LOOKED UP tok": "lookup_tokens_total",
    "HITS": "hits_total",
    "HIT tok": "hit_tokens_total",
    "STORED tok": "store_tokens_total",
    "EVICTED tok": "evicted_tokens_total",
}
COLUMNS = [Column("RANK"), *(Column(head) for head in COUNTERS), Column("HIT RATE"), Column("ARENA USED")]
REASONS = {
    "misses": "miss_total",
    "states hit": "state_hits_total",
    "states kept": "states_written_total",
    "not stored": "store_skipped_total",
}


def _stats(
    call: Invocation,
    port: Port = None,
    url: Url = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing; Ctrl-C ends it.")] = False,
    interval: Annotated[str, typer.Option("--interval", metavar="TIME", help="Time between two looks.")] = "1s",
) -> int:
    """Show the prefix cache's live counters, per rank, and why requests missed.

      dix cache stats
      dix cache stats --watch

    Next: dix cache explain, dix check-cache
    """
    interval_s = parse_duration(interval, "--interval")
    api = connect(call, port, url)
    if watch:
        follow(call, api, interval_s)
        return ExitCode.OK
    metrics = api.get("/deepinfer/metrics")
    if call.json:
        call.ui.document("dix.cache/1", plain(api, metrics))
    else:
        show(call, metrics)
    return ExitCode.OK


def follow(call: Invocation, api: Api, interval_s: float) -> None:
    if call.json or not call.ui.stdout.isatty():
        while True:
            metrics = api.get("/deepinfer/metrics")
            if call.json:
                call.ui.event("cache", **plain(api, metrics))
            else:
                show(call, metrics)
            time.sleep(interval_s)
    with call.ui.watch(interval_s) as region:
        while True:
            metrics = api.get("/deepinfer/metrics")
            region.update(call.ui.build_table(COLUMNS, table_rows(metrics), call.ui.out.width))
            time.sleep(interval_s)


def plain(api: Api, metrics: Mapping[str, Any]) -> dict[str, Any]:
    caches = [{"rank": rank.get("rank"), **(rank.get("prefix_cache") or {})} for rank in metrics.get("ranks") or []]
    totals = (metrics.get("totals") or {}).get("prefix_cache") or {}
    return {"url": api.url, "ranks": caches, "totals": totals, "checksum_errors": checksum_errors(metrics)}


def table_rows(metrics: Mapping[str, Any]) -> list[list[Any]]:
    ranks = metrics.get("ranks") or []
    rows = [row(str(rank.get("rank")), rank.get("prefix_cache") or {}, host_share([rank])) for rank in ranks]
    if len(ranks) > 1:
        rows.append(row("all", (metrics.get("totals") or {}).get("prefix_cache") or {}, host_share(ranks)))
    return rows


def show(call: Invocation, metrics: Mapping[str, Any]) -> None:
    ranks = metrics.get("ranks") or []
    call.ui.table(COLUMNS, table_rows(metrics))
    totals = (metrics.get("totals") or {}).get("prefix_cache") or {}
    for title, leaf in REASONS.items():
        counts = {name: number for name, number in (totals.get(leaf) or {}).items() if number}
        if counts:
            call.ui.print(f"{title}: " + " · ".join(f"{name} {number:,.0f}" for name, number in sorted(counts.items())))
    if line := pages_line(ranks):
        call.ui.print(line)
    for rank in ranks:
        if line := disk_line(rank):
            call.ui.print(line)
    if errors := checksum_errors(metrics):
        call.ui.warn(f"{errors} stored pages did not match their checksum and were dropped")
    if foreign := totals.get("token_errors_total"):
        call.ui.warn(f"{foreign:,.0f} stored pages lay under the key of other tokens and were dropped: please report this")
    if not any((rank.get("prefix_cache") or {}).get("lookups_total") for rank in ranks):
        call.ui.note("no lookups yet: the cache is off, or nothing was asked", "quiet")


def pages_line(ranks: list[Mapping[str, Any]]) -> str:
    """How many stored pages rank above or below the default priority, and how many lie beyond every state; "" when there are none."""
    caches = [rank.get("prefix_cache") or {} for rank in ranks]
    counts = {f"of {name} priority": sum((cache.get("priority_pages") or {}).get(name, 0) for cache in caches) for name in ("high", "low")}
    counts["beyond the last state"] = sum(cache.get("pages_unreachable", 0) for cache in caches)
    return "pages: " + " · ".join(f"{count:,} {name}" for name, count in counts.items() if count) if any(counts.values()) else ""


def disk_line(rank: Mapping[str, Any]) -> str:
    """What a rank keeps on disk, "" without a disk tier."""
    cache = rank.get("prefix_cache") or {}
    disk = cache.get("disk") or {}
    if not disk:
        return ""
    hits = ((cache.get("tiers") or {}).get("disk") or {}).get("hit_tokens_total", 0)
    state = " · full" if disk.get("full") else ""
    return (
        f"disk of rank {rank.get('rank')}: {disk['bytes'] / 2**30:.2f} GiB · {disk['pages']:,} pages, {disk['states']:,} states · "
        f"{disk['loads_total']:,} loads, {hits:,} hit tokens{state}"
    )


def row(name: str, cache: Mapping[str, Any], used: float | None) -> list[Any]:
    looked, hit = cache.get("lookup_tokens_total", 0), cache.get("hit_tokens_total", 0)
    cells: list[Any] = [name, *(f"{cache[key]:,.0f}" if key in cache else None for key in COUNTERS.values())]
    return [*cells, f"{hit / looked:.1%}" if looked else None, f"{used:.0%}" if used is not None else None]


def _reset(
    call: Invocation,
    port: Port = None,
    url: Url = None,
) -> int:
    """Forget every stored prefix on all ranks.

      dix cache reset

    Next: dix cache stats
    """
    api = connect(call, port, url)
    api.post("/reset_prefix_cache", {})
    if call.json:
        call.ui.document("dix.cache.reset/1", {"url": api.url})
    else:
        call.ui.print(f"the prefix cache of {api.url} is empty")
    return ExitCode.OK


stats, reset = command(_stats), command(_reset)
TABLE = {
    "stats": Lazy("deepinfer_cli.commands.cache:stats", "Show live counters per rank."),
    "explain": Lazy("deepinfer_cli.commands.cache_explain:explain", "Show what a prompt finds, and where it parts from a stored one."),
    "reset": Lazy("deepinfer_cli.commands.cache:reset", "Forget every stored prefix."),
}
