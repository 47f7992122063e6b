"""A running server's state in a few numbers, from its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_cli.api import Api, RequestRefused

_PATIENCE_S = 10.0  # a rank reports twice a second, but never within a step
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Glance:
    """One server at one moment. Shares in 0..1; `tok_s` needs two samples and is None before. `hit_share`: cached of all prompt tokens."""

    state: str
    running: int
    waiting: int
    device_kv: float | None
    host_kv: float | None
    generated_total: int
    prompt_total: int
    cached_total: int
    at_s: float
    tok_s: float | None = None

    @property
    def hit_share(self) -> float | None:
        return self.cached_total / self.prompt_total if self.prompt_total else None


def glance(api: Api, before: Glance | None = None) -> Glance:
    """Sample `/deepinfer/metrics`. Raises: ServerUnreachable, RequestRefused."""
    return from_metrics(api.get("/deepinfer/metrics"), before, time.monotonic())


def settled_metrics(api: Api) -> Mapping[str, Any]:
    """`/deepinfer/metrics` once every rank has reported what it counted up to this call; {} where the server has no such route.

    Ranks that say nothing for ten seconds are taken as they last were: what hangs is not for this caller to judge.
    """
    try:
        metrics: Mapping[str, Any] = api.get("/deepinfer/metrics")
        asked, give_up_s = metrics.get("time", 0.0), time.monotonic() + _PATIENCE_S
        while any(rank.get("report_time", asked + 1) <= asked for rank in metrics.get("ranks") or []) and time.monotonic() < give_up_s:
            time.sleep(_LOOK_S)
            metrics = api.get("/deepinfer/metrics")
    except RequestRefused:
        return {}
    return metrics


def from_metrics(metrics: Mapping[str, Any], before: Glance | None, at_s: float) -> Glance:
    ranks = metrics.get("ranks") or []
    kv = [_path(rank, "kv") for rank in ranks]
    total, used = sum(k.get("tokens_total", 0) for k in kv), sum(k.get("tokens_used", 0) for k in kv)
    generated = int(_leaf(metrics, "tokens", "generated_total"))
    elapsed_s = at_s - before.at_s if before else 0.0
    return Glance(
        state=str(metrics.get("state", "unknown")),
        running=int(sum(rank.get("running", 0) for rank in ranks)),
        waiting=int(sum(rank.get("waiting", 0) for rank in ranks)),
        device_kv=used / total if total else None,
        host_kv=host_share(ranks),
        generated_total=generated,
        prompt_total=int(_leaf(metrics, "tokens", "prompt_total")),
        cached_total=int(_leaf(metrics, "tokens", "cached_total")),
        at_s=at_s,
        tok_s=(generated - before.generated_total) / elapsed_s if before and elapsed_s > 0 else None,
    )


def host_share(ranks: list[Mapping[str, Any]]) -> float | None:
    """Used share of the host arenas, where the server reports frames. Frames that are not page-locked yet do not count."""
    free = used = 0.0
    for rank in ranks:
        cache = _path(rank, "prefix_cache")
        frames = cache.get("frames") or {}
        free += frames.get("free", cache.get("frames_free", 0))
        used += sum(v for k, v in frames.items() if k not in ("free", "absent")) if frames else cache.get("frames_used", 0)
    return used / (free + used) if free + used else None


def checksum_errors(metrics: Mapping[str, Any]) -> int:
    """Stored pages that did not match their checksum, over all ranks. 0 where the server does not count them."""
    return sum(_sum_named(_path(rank, "prefix_cache"), "checksum_errors") for rank in metrics.get("ranks") or [])


def bounded_replays(metrics: Mapping[str, Any]) -> int:
    """Prompts that resumed behind an approximate window, over all ranks. 0 where the server does not count them."""
    return sum(int(_path(rank, "prefix_cache", "state_hits_total").get("bounded_replay", 0)) for rank in metrics.get("ranks") or [])


def _sum_named(node: Any, stem: str) -> int:
    if not isinstance(node, Mapping):
        return 0
    own = sum(int(value) for key, value in node.items() if stem in key and isinstance(value, (int, float)))
    return own + sum(_sum_named(value, stem) for value in node.values())


def _path(node: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        node = node.get(name) or {}
    return node


def _leaf(metrics: Mapping[str, Any], group: str, name: str) -> float:
    """`totals` keeps what replaced ranks had counted; ranks are summed where there are no totals."""
    totals = _path(metrics, "totals", group)
    if name in totals:
        return float(totals[name])
    return float(sum(_path(rank, group).get(name, 0) for rank in metrics.get("ranks") or []))
