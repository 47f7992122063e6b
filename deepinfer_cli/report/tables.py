"""Tables of a summary: built once as data, printed on the terminal here and as HTML by `html.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_cli.report.server_side import PARTS
from deepinfer_cli.report.stats import STATS, Summary
from deepinfer_cli.units import show_duration, show_number

if TYPE_CHECKING:
    from deepinfer_cli.ui import Ui

NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "End to end"}


@dataclass(frozen=True, slots=True)
class Grid:
    """One table: a title, heads with their units, and cells as text. `left`: columns of words."""

    title: str
    heads: list[str]
    rows: Sequence[Sequence[str | None]]
    left: frozenset[int] = frozenset({0})
    note: str = ""


def grids(summary: Summary) -> list[Grid]:
    """Every table of one run, in the order of reading. Tables without rows are left out."""
    every = [
        latency(summary),
        ttft_split(summary),
        throughput(summary),
        without_empty_columns(by_turn(summary)),
        without_empty_columns(by_rank(summary)),
        cache_check(summary),
        speculation(summary),
    ]
    return [grid for grid in every if grid.rows]


def without_empty_columns(grid: Grid) -> Grid:
    """Columns in which no row has anything to say only take the room of those that have."""
    keep = [i for i in range(len(grid.heads)) if i == 0 or any(row[i] not in (None, "–") for row in grid.rows)]
    left = frozenset(keep.index(i) for i in grid.left if i in keep)
    return Grid(grid.title, [grid.heads[i] for i in keep], [[row[i] for i in keep] for row in grid.rows], left, grid.note)


def head_lines(summary: Summary) -> list[str]:
    """What was measured, whether it counts, and what went wrong."""
    run = summary.run
    server = run.get("server", {})
    ok, made = summary.value("requests", "ok") or 0, len(summary.requests)
    ranks = f" · {server['ranks']} rank{'s' if server.get('ranks') != 1 else ''}" if server.get("ranks") else ""
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.get("started_unix_s", 0)))
    window = show_duration(run.get("window_s") or 0.0)
    lines = [
        f"{run.get('recipe')} · {server.get('model')} at {server.get('url')}{ranks} · {started} · window {window}",
        f"{'valid' if run.get('valid') else 'not valid'} · {run.get('status')} · {ok:,.0f} of {made:,} requests ok"
        + "".join(
            f" · {summary.value('requests', kind):,.0f} {kind}"
            for kind in ("failed", "truncated", "cancelled")
            if summary.value("requests", kind)
        ),
    ]
    lines += [f"reason: {reason}" for reason in run.get("reasons") or []]
    lines += [f"error: {count} × {text}" for text, count in summary.errors[:3]]
    lines += [f"note: {text}" for text in run.get("notes") or []]
    if summary.stamp:
        lines.append(summary.stamp)
    return lines


def latency(summary: Summary) -> Grid:
    rows: list[list[str | None]] = []
    for metric, name in NAMES.items():
        first = summary.row(metric, "mean")
        if first is not None:
            rows.append([f"{name} ms", f"{first.n:,}", *(show_number(summary.value(metric, stat)) for stat in STATS)])
    note = "– : fewer than 10 requests beyond that percentile. ITL: gap between chunks. TPOT: decode time per token."
    return Grid("Latency", ["", "n", *STATS], rows, note=note)


def ttft_split(summary: Summary) -> Grid:
    """What the server said about the time to first token, part by part."""
    whole = summary.value("ttft", "mean")
    rows: list[list[str | None]] = []
    for metric, _, name, what in PARTS:
        row = summary.row(metric, "mean")
        if row is None or row.value is None:
            continue
        share = show_share(row.value / whole) if whole else None
        cells = [show_number(summary.value(metric, stat)) for stat in ("mean", "p50", "p90", "p99", "max")]
        rows.append([name, what, f"{row.n:,}", share, *cells])
    heads = ["", "", "n", "share", "mean ms", "p50", "p90", "p99", "max"]
    return Grid("Where the time to first token went", heads, rows, left=frozenset({0, 1}))


def speculation(summary: Summary) -> Grid:
    """Drafted and accepted tokens by the server's counters."""
    if summary.row("speculation", "drafted") is None:
        return Grid("Speculation", [], [])
    places = [row for row in summary.rows if row.metric == "speculation" and row.stat.startswith("acceptance place")]
    heads = ["Drafted tok", "Accepted tok", "Acceptance", "Tokens a step", *(f"Place {row.stat.split()[-1]}" for row in places)]
    row: list[str | None] = [show_number(summary.value("speculation", name), 0) for name in ("drafted", "accepted")]
    row += [show_share(summary.value("speculation", "acceptance")), show_number(summary.value("speculation", "tokens_per_step"), 2)]
    row += [show_share(place.value) for place in places]
    note = "Place n: share of the n-th drafted tokens that were kept, of those that were verified."
    return Grid("Speculation", heads, [row], left=frozenset(), note=note)


def throughput(summary: Summary) -> Grid:
    names = {
        "output_rate": ("Output tok/s", 1),
        "input_rate": ("Input tok/s", 1),
        "uncached_input_rate": ("Uncached input tok/s", 1),
        "request_rate": ("Requests/s", 2),
        "user_rate": ("Tok/s per user (median)", 1),
    }
    rows: list[list[str | None]] = []
    for metric, (name, digits) in names.items():
        row = summary.row(metric)
        if row is not None:
            rows.append([name, show_number(row.value, digits), f"{row.n:,}"])
    return Grid("Throughput", ["", "value", "n"], rows)


def by_turn(summary: Summary) -> Grid:
    rows: list[list[str | None]] = []
    for group in summary.groups("turn"):
        first = summary.row("ttft", "mean", group)
        rows.append(
            [
                str(int(group.split()[1]) + 1),
                f"{first.n:,}" if first else "0",
                show_number(summary.value("prompt_tokens", "median", group), 0),
                show_share(summary.value("hit_rate_client", group=group)),
                *(show_number(summary.value("ttft", stat, group)) for stat in ("mean", "p50", "p90")),
                show_number(summary.value("tpot", "mean", group)),
            ]
        )
    heads = ["Turn", "n", "Prompt tok (median)", "Hit rate", "TTFT mean ms", "p50", "p90", "TPOT mean ms"]
    return Grid("By turn", heads, rows, left=frozenset())


def by_rank(summary: Summary) -> Grid:
    rows: list[list[str | None]] = []
    for group in summary.groups("rank"):
        requests = summary.row("prompt_tokens", "sum", group)
        rows.append(
            [
                group.split()[1],
                f"{requests.n:,}" if requests and requests.n else None,
                *(show_number(summary.value(metric, "sum", group), 0) for metric in ("prompt_tokens", "output_tokens", "cached_tokens")),
                *_client_side(summary, group),
                show_share(summary.value("hit_rate_server", group=group)),
                show_number(summary.value("ttft", "mean", group)),
            ]
        )
    heads = ["Rank", "Requests", "Prompt tok", "Output tok", "Cached tok", "Client's cached tok", "Difference", "Hit rate", "TTFT mean ms"]
    note = "Tokens, hit rate: the server's counters. Client's cached tok: the answers' usage. Requests, TTFT: answers that name a rank."
    return Grid("By rank", heads, rows, left=frozenset(), note=note)


def _client_side(summary: Summary, group: str) -> list[str | None]:
    """Cached tokens as clients were told, and the difference from the counters; an empty difference means none."""
    told, counted = summary.value("cached_tokens_client", "sum", group), summary.value("cached_tokens", "sum", group)
    if told is None or counted is None:
        return [None, None]
    return [show_number(told, 0), f"{told - counted:+,.0f}".replace("-", "−") if told != counted else "0"]


def cache_check(summary: Summary) -> Grid:
    """Client's and server's account of the cache, side by side."""
    client, server = summary.value("cached_tokens", "sum"), summary.value("cached_tokens_server", "sum")
    if client is None and server is None:
        return Grid("Cache", [], [])
    difference = None if client is None or server is None else client - server
    rows: list[list[str | None]] = [
        ["Cached tokens", show_number(client, 0), show_number(server, 0), show_number(difference, 0)],
        ["Hit rate", show_share(summary.value("hit_rate_client")), show_share(summary.value("hit_rate_server")), None],
    ]
    note = "" if not difference else "The accounts differ: other clients used the server, or requests failed after their prefill."
    return Grid("Cache", ["", "Client's usage", "Server's counters", "Difference"], rows, note=note)


def show_share(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def print_grid(ui: Ui, grid: Grid) -> None:
    from deepinfer_cli.ui import Column

    ui.print()
    ui.print(grid.title, "accent")
    ui.table([Column(head, right=index not in grid.left) for index, head in enumerate(grid.heads)], grid.rows)


def print_summary(ui: Ui, summary: Summary, *, short: bool = False) -> None:
    """The whole run on the terminal; `short` leaves out what only a reader of reports needs."""
    for line in head_lines(summary):
        ui.print(line, _role(line, summary), prose=True)
    for grid in grids(summary):
        if not short or grid.title in ("Latency", "By turn"):
            print_grid(ui, grid)
    if not short and (grid := latency(summary)).rows:
        ui.print()
        ui.note(grid.note, "quiet")


def _role(line: str, summary: Summary) -> str:
    if line == summary.stamp or line.startswith("note:"):
        return "warning"
    if line.startswith(("not valid", "reason", "error")):
        return "bad"
    return ""


def summary_document(summary: Summary) -> dict[str, Any]:
    """The run for `--json`: base units are those of the rows."""
    rows = [
        {"group": r.group, "metric": r.metric, "stat": r.stat, "value": r.value, "unit": r.unit, "n": r.n, "low": r.low, "high": r.high}
        for r in summary.rows
    ]
    run = {key: value for key, value in summary.run.items() if not key.startswith("counters_") and key != "schema"}
    return {"run": run, "rows": rows, "errors": [{"text": t, "count": c} for t, c in summary.errors], "note": summary.stamp}
