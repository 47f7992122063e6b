"""The server's own account: where the time to first token went, what its counters say of the cache, and how speculation went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

# Parts of the client's TTFT in the order of time: metric, column, and what it is. The last two follow from the others.
PARTS = (
    ("ttft_queue", "server_queue_ms", "Queue", "waiting for a prompt step"),
    ("ttft_restore", "restore_ms", "Restore", "copying what the prefix cache held"),
    ("ttft_prefill", "prefill_ms", "Prefill and first token", "computing the rest of the prompt"),
    ("ttft_front", "", "Server outside the engine", "routing, and until the running step has ended"),
    ("ttft_client", "", "Way to the client", "HTTP, rendering and tokenising"),
)
RESTORED = ("server_queue_ms", "restore_ms", "prefill_ms")


def split_of_ttft(good: pd.DataFrame) -> dict[str, pd.Series[float]]:
    """Metric -> ms per request, for requests of which the server told; empty when it told of none."""
    if "server_ttft_ms" not in good.columns:
        return {}
    told = good[good["server_ttft_ms"].notna() & good["prefill_ms"].notna()]
    if told.empty:
        return {}
    inside = sum((told[column] for column in RESTORED[1:]), start=told[RESTORED[0]])
    return {
        **{metric: told[column] for metric, column, *_ in PARTS if column},
        "ttft_front": (told["server_ttft_ms"] - inside).clip(lower=0.0),
        "ttft_client": (told["ttft_ms"] - told["server_ttft_ms"]).clip(lower=0.0),
    }


def mean_split_of_ttft(run: Mapping[str, Any], client_ttft_ms: float | None) -> tuple[dict[str, float], int]:
    """Metric -> mean ms by the server's counters, and how many first tokens they saw: for harnesses that keep no account per request.

    client_ttft_ms: mean by the client, which the way to the client is the rest of.
    """
    after, before = (run.get(name) or {} for name in ("counters_after", "counters_before"))
    if after.get("boot_id") != before.get("boot_id"):
        return {}, 0  # a server that started anew counts from zero
    now, then = (document.get("first_tokens") or {} for document in (after, before))

    def grown(name: str) -> float:
        return float(now.get(name, 0)) - float(then.get(name, 0))

    count = int(grown("requests_total"))
    if count <= 0:
        return {}, 0
    queue, restore, prefill, whole = (grown(f"{part}_seconds_total") / count * 1e3 for part in ("queue", "restore", "prefill", "ttft"))
    split = {
        "ttft_queue": queue,
        "ttft_restore": restore,
        "ttft_prefill": prefill,
        "ttft_front": max(0.0, whole - queue - restore - prefill),
    }
    if client_ttft_ms is not None:
        split["ttft_client"] = max(0.0, client_ttft_ms - whole)
    return split, count


@dataclass(frozen=True, slots=True)
class Growth:
    """What one rank's counters grew by during the run."""

    rank: int
    now: Mapping[str, Any]
    then: Mapping[str, Any]

    def of(self, group: str, name: str) -> float:
        return float((self.now.get(group) or {}).get(name, 0)) - float((self.then.get(group) or {}).get(name, 0))

    def by_place(self, name: str) -> dict[int, float]:
        """Place in the drafted block -> tokens."""
        now, then = ((side.get("spec") or {}).get(name) or {} for side in (self.now, self.then))
        return {int(place): float(count) - float(then.get(place, 0)) for place, count in now.items()}


def growths(run: Mapping[str, Any]) -> list[Growth]:
    """One per rank; empty without counters. A rank that was replaced counts from zero again."""
    before, after = run.get("counters_before"), run.get("counters_after")
    if not before or not after:
        return []
    old = {rank["rank"]: rank for rank in before.get("ranks") or []}
    out = []
    for rank in after.get("ranks") or []:
        then = old.get(rank["rank"], {})
        out.append(Growth(rank["rank"], rank, then if then.get("generation") == rank.get("generation") else {}))
    return out


def speculation(found: list[Growth]) -> dict[str, float]:
    """Drafted and accepted tokens by the counters, and by place in the block; empty when nothing was drafted."""
    drafted, accepted, verified = (
        sum(g.of("spec", name) for g in found) for name in ("draft_tokens_total", "accepted_tokens_total", "drafts_total")
    )
    if not drafted:
        return {}
    out = {"drafted": drafted, "accepted": accepted, "acceptance": accepted / drafted}
    if verified:
        out["tokens_per_step"] = 1 + accepted / verified
    places = sorted({place for g in found for place in g.by_place("verified_by_place_total")})
    for place in places:
        seen = sum(g.by_place("verified_by_place_total").get(place, 0.0) for g in found)
        kept = sum(g.by_place("accepted_by_place_total").get(place, 0.0) for g in found)
        if seen:
            out[f"acceptance place {place}"] = kept / seen
    return out
