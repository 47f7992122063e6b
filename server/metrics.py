"""What the front counts, and the two documents made of it: JSON and Prometheus text (`server/prometheus.py`)."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry

from engine.request import Output, Timing
from server.histogram import Histogram, Series
from server.rank_pool import RankPool
from server.router import Router
from server.tickets import Ticket
from server.totals import Record, added, empty_record

FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
REJECTIONS = ("400", "401", "404", "413", "429", "503")
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
MAX_UNKNOWN_NAMES = 256
FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
HISTOGRAMS = {
    "time_to_first_token_seconds": SECONDS,
    "inter_token_latency_seconds": SECONDS,
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "iteration_tokens_total": TOKENS,
}
LOOP_PROBE_S = 0.05
LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

log = logging.getLogger("front")


@dataclass(slots=True)
class Watchdog:
    deaths_total: int = 0
    hangs_total: int = 0
    restarts_total: int = 0
    failed_requests_total: int = 0


@dataclass(slots=True)
class FirstTokens:
    """Where the time to the first tokens went, summed over requests; ttft is from arrival at the server."""

    requests_total: int = 0
    queue_seconds_total: float = 0.0
    restore_seconds_total: float = 0.0
    prefill_seconds_total: float = 0.0
    ttft_seconds_total: float = 0.0

    def add(self, timing: Timing, ttft_s: float) -> None:
        self.requests_total += 1
        self.queue_seconds_total += timing.queue_s
        self.restore_seconds_total += timing.restore_s
        self.prefill_seconds_total += timing.prefill_s
        self.ttft_seconds_total += ttft_s


@dataclass(slots=True)
class FrontMetrics:
    """Counters of one life of the front; `boot_id` changes with it."""

    model: str
    boot_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    started_s: float = field(default_factory=time.monotonic)
    started_unix_s: float = field(default_factory=time.time)
    received_total: int = 0
    admitted_total: int = 0
    streams_open: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    finished_by_rank: Counter[tuple[int, str]] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    unknown_fields_total: int = 0
    # Oddities of conversations and outputs: history_missing_reasoning, malformed_calls, undeclared_calls, ...
    oddities: Counter[str] = field(default_factory=Counter)
    watchdog: Watchdog = field(default_factory=Watchdog)
    first_tokens: FirstTokens = field(default_factory=FirstTokens)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    loop_lag: prometheus_client.Histogram = field(init=False)
    _unknown_seen: set[str] = field(default_factory=set)
    _series: dict[tuple[str, int], Series] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, bounds in HISTOGRAMS.items():
            self.histograms[name] = Histogram(f"deepinfer:{name}", name.replace("_", " "), ("model_name", "engine"), bounds)
            self.registry.register(self.histograms[name])
        self.loop_lag = prometheus_client.Histogram(
            "deepinfer:event_loop_lag_seconds", "how late the front's event loop runs", buckets=LAGS, registry=self.registry
        )

    async def watch_loop(self, tick: Callable[[], None]) -> None:
        """Tick for ever, and note how late the timer fires: whatever blocks the loop delays every stream by as much."""
        while True:
            due_s = time.monotonic() + LOOP_PROBE_S
            tick()
            await asyncio.sleep(LOOP_PROBE_S)
            self.loop_lag.observe(max(0.0, time.monotonic() - due_s))

    def observe(self, name: str, rank: int, value: float) -> None:
        series = self._series.get((name, rank))
        if series is None:
            series = self._series[name, rank] = self.histograms[name].labels(self.model, str(rank))
        series.observe(value)

    def on_output(self, ticket: Ticket, output: Output, now: float) -> None:
        """Called for every output before the ticket is updated."""
        if not output.token_ids:
            return
        if ticket.first_output_s is None:
            self.observe("time_to_first_token_seconds", ticket.rank, now - ticket.started_s)
        else:
            self.observe("inter_token_latency_seconds", ticket.rank, (now - ticket.last_output_s) / len(output.token_ids))
        if output.timing is not None:
            self.first_tokens.add(output.timing, now - ticket.started_s)
            self.observe("request_queue_time_seconds", ticket.rank, output.timing.queue_s)
            self.observe("request_prefill_time_seconds", ticket.rank, output.timing.prefill_s)
        self.observe("iteration_tokens_total", ticket.rank, len(output.token_ids))

    def finish(self, ticket: Ticket, reason: str) -> None:
        now = time.monotonic()
        self.finished[reason] += 1
        self.finished_by_rank[ticket.rank, reason] += 1
        self.observe("e2e_request_latency_seconds", ticket.rank, now - ticket.started_s)
        self.observe("request_prompt_tokens", ticket.rank, ticket.prompt_len)
        self.observe("request_generation_tokens", ticket.rank, ticket.generated_tokens)
        if ticket.first_output_s is not None:
            self.observe("request_decode_time_seconds", ticket.rank, now - ticket.first_output_s)

    def note_unknown(self, names: list[str]) -> None:
        """Fields that mean nothing here are counted, and logged once per name; the memory of names is bounded. What is no name may be
        text of a conversation, which belongs into no log."""
        self.unknown_fields_total += len(names)
        for name in names:
            if name not in self._unknown_seen and len(self._unknown_seen) < MAX_UNKNOWN_NAMES and FIELD_NAME.fullmatch(name):
                self._unknown_seen.add(name)
                log.info("unknown request field %s is ignored", name)

    def reject(self, status: int) -> None:
        if str(status) in REJECTIONS:
            self.rejected[str(status)] += 1


def json_document(metrics: FrontMetrics, pool: RankPool, state: str) -> dict[str, Any]:
    """The document of /deepinfer/metrics. Numbers only; built from the last snapshots, so a dead rank never delays it."""
    totals, rank_state = empty_record(), "ready" if pool.serving else "starting"
    ranks = []
    for view in pool.ranks:
        totals = added(totals, added(view.stats, view.retired))
        # The document's name for an incarnation is `generation`.
        head: Record = {"rank": view.rank, "pid": view.pid, "state": rank_state, "generation": pool.incarnation}
        ages = {"heartbeat_age_s": round(pool.heartbeats.read(view.rank).loop_age_s, 3), "report_time": view.report_unix_s}
        ranks.append({**head, **ages, **view.stats})
    return {
        "schema": 1,
        "time": time.time(),
        "boot_id": metrics.boot_id,
        "uptime_s": time.monotonic() - metrics.started_s,
        "model": metrics.model,
        "state": state,
        "requests": _requests(metrics, pool),
        "routing": _routing(pool.router),
        "watchdog": asdict(metrics.watchdog),
        "first_tokens": asdict(metrics.first_tokens),
        "ranks": ranks,
        "totals": totals,
    }


def _routing(router: Router) -> Record:
    """asked_ranks: whose caches the router can ask. prices: of a restored token in computed ones."""
    record: Record = {"keys": router.num_keys, **asdict(router.counts)}
    if router.policy == "cost":
        record["asked_ranks"] = len(router.stored) if router.stored is not None else 0
        record["in_flight"] = len(router.costs.in_flight)
        record["prices"] = {source: round(router.costs.price(source), 6) for source in router.costs.restored}
    return record


def _requests(metrics: FrontMetrics, pool: RankPool) -> dict[str, Any]:
    tickets = pool.tickets
    return {
        "received_total": metrics.received_total,
        "admitted_total": metrics.admitted_total,
        "finished_total": {reason: metrics.finished[reason] for reason in FINISH_REASONS},
        "rejected_total": {status: metrics.rejected[status] for status in REJECTIONS},
        "active": sum(not ticket.queued for ticket in tickets),
        "queued": sum(ticket.queued for ticket in tickets),
        "streams_open": metrics.streams_open,
        "slow_readers_total": pool.slow_readers_total,
        "unread_bytes": pool.unread_bytes,
    }
