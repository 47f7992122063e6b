"""Prometheus text of the front and its ranks, under our names and under those that existing dashboards read."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from server.metrics import FrontMetrics
from server.rank_pool import RankPool
from server.rank_view import RankView
from server.totals import Record, added

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
Reader = Callable[[Record], float]


def _leaf(*path: str) -> Reader:
    def read(record: Record) -> float:
        value: object = record
        for name in path:
            value = value.get(name, 0) if isinstance(value, dict) else 0
        return float(value) if isinstance(value, (int, float)) else 0.0

    return read


def _usage(record: Record) -> float:
    capacity = _leaf("kv", "tokens_total")(record)
    return _leaf("kv", "tokens_used")(record) / capacity if capacity else 0.0


def _hit_rate(record: Record) -> float:
    looked_up = _leaf("prefix_cache", "lookup_tokens_total")(record)
    return _leaf("prefix_cache", "hit_tokens_total")(record) / looked_up if looked_up else 0.0


@dataclass(slots=True)
class Rate:
    """How fast a counter grew since it was last looked at. Looks within a second of each other share one answer."""

    _value: float = 0.0
    _total: float = 0.0
    _at_s: float | None = None

    def per_second(self, total: float, now_s: float) -> float:
        if self._at_s is None or now_s - self._at_s >= 1.0:
            self._value = (total - self._total) / (now_s - self._at_s) if self._at_s is not None else 0.0
            self._total, self._at_s = total, now_s
        return self._value


def _off_device(leaf: str) -> Reader:
    return lambda record: sum(_leaf("prefix_cache", "tiers", tier, leaf)(record) for tier in ("host", "peer", "disk"))


ODDITIES = ("history_missing_reasoning", "malformed_calls", "undeclared_calls", "invalid_json_values", "duplicate_parameters")
GAUGES: dict[str, Reader] = {
    "num_requests_running": _leaf("running"),
    "num_requests_waiting": _leaf("waiting"),
    "kv_cache_usage_perc": _usage,
}
COUNTERS: dict[str, Reader] = {
    "prompt_tokens": _leaf("tokens", "prompt_total"),
    "generation_tokens": _leaf("tokens", "generated_total"),
    "prompt_tokens_cached": _leaf("tokens", "cached_total"),
    "num_preemptions": _leaf("preemptions_total"),
    "prefix_cache_queries": _leaf("prefix_cache", "lookup_tokens_total"),
    "prefix_cache_hits": _leaf("prefix_cache", "tiers", "device", "hit_tokens_total"),
    "external_prefix_cache_queries": _leaf("prefix_cache", "lookup_tokens_total"),
    "external_prefix_cache_hits": _off_device("hit_tokens_total"),
    "spec_decode_num_drafts": _leaf("spec", "drafts_total"),
    "spec_decode_num_draft_tokens": _leaf("spec", "draft_tokens_total"),
    "spec_decode_num_accepted_tokens": _leaf("spec", "accepted_tokens_total"),
}
SGLANG_GAUGES: dict[str, Reader] = {
    "num_running_reqs": _leaf("running"),
    "num_queue_reqs": _leaf("waiting"),
    "token_usage": _usage,
    "cache_hit_rate": _hit_rate,
}
NATIVE_COUNTERS: dict[str, Reader] = {
    "prefix_cache_query_tokens": _leaf("prefix_cache", "lookup_tokens_total"),
    "steps": _leaf("steps_total"),
    "prefix_cache_stored_tokens": _leaf("prefix_cache", "store_tokens_total"),
    "prefix_cache_evicted_tokens": _leaf("prefix_cache", "evicted_tokens_total"),
    "prefix_cache_resume_tokens": _leaf("prefix_cache", "resume_tokens_total"),
    "hicache_replayed_tokens": _leaf("prefix_cache", "replayed_tokens_total"),
    "hicache_restore_bytes": _leaf("prefix_cache", "restore_bytes_total"),
    "hicache_store_bytes": _leaf("prefix_cache", "store_bytes_total"),
    "hicache_checksum_errors": _leaf("prefix_cache", "checksum_errors_total"),
    "hicache_token_errors": _leaf("prefix_cache", "token_errors_total"),
    "hicache_priorities_refused": _leaf("prefix_cache", "priorities_refused_total"),
    "hicache_copy_errors": _leaf("prefix_cache", "copy_errors_total"),
    "hicache_disk_read_bytes": _leaf("prefix_cache", "disk", "read_bytes_total"),
    "hicache_disk_written_bytes": _leaf("prefix_cache", "disk", "written_bytes_total"),
    "expert_plans": _leaf("experts", "plans_total"),
    "expert_moved_layers": _leaf("experts", "moved_layers_total"),
    "expert_moved_bytes": _leaf("experts", "moved_bytes_total"),
    "hicache_holds": _leaf("prefix_cache", "holds_total"),
}
NATIVE_GAUGES: dict[str, Reader] = {
    "expert_balance": _leaf("experts", "balance"),
    "hicache_arena_bytes": _leaf("prefix_cache", "arena_bytes"),
    "hicache_pinned_bytes": _leaf("prefix_cache", "pinned_bytes"),
    "hicache_pageable": _leaf("prefix_cache", "pageable"),
    "hicache_pages_unreachable": _leaf("prefix_cache", "pages_unreachable"),
    "hicache_held_requests": _leaf("prefix_cache", "held_requests"),
    "hicache_disk_bytes": _leaf("prefix_cache", "disk", "bytes"),
}
# Leaves that are dicts: (names of the labels, leaf). Keys of several labels hold a slash. The labels' values are ours, never a client's.
LABELLED_COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "hicache_miss": (("reason",), "miss_total"),
    "hicache_store_skipped": (("reason",), "store_skipped_total"),
    "hicache_states_written": (("reason",), "states_written_total"),
    "hicache_state_hits": (("reason",), "state_hits_total"),
    "hicache_evicted_frames": (("kind", "reason"), "evicted_frames_total"),
    "hicache_disk_errors": (("kind",), "disk_errors_total"),
}
LABELLED_GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "hicache_frames": (("state",), "frames"),
    "hicache_priority_pages": (("priority",), "priority_pages"),
    "hicache_transfer": (("name",), "transfer"),
}
HISTOGRAMS = ("restore_seconds", "store_seconds", "hold_seconds")  # of the cache's record: sum in `*_total`, counts in `*_buckets_total`


class RankCollector(Collector):
    """Reads the last snapshots at scrape time. Counters add what earlier incarnations of a rank counted."""

    def __init__(self, metrics: FrontMetrics, pool: RankPool, foreign: Collection[str] = ("vllm",)) -> None:
        """foreign: namespaces of other servers whose names are offered as well ("vllm", "sglang")."""
        self.metrics = metrics
        self.pool = pool
        self.foreign = foreign
        self._rates: dict[int, Rate] = {}

    def collect(self) -> Iterator[Metric]:
        for namespace in ("deepinfer", *(["vllm"] if "vllm" in self.foreign else [])):
            for name, read in GAUGES.items():
                yield self._gauge(f"{namespace}:{name}", read)
            for name, read in COUNTERS.items():
                yield self._counter(f"{namespace}:{name}", read)
            yield self._finished(f"{namespace}:request_success")
        for name, read in NATIVE_COUNTERS.items():
            yield self._counter(f"deepinfer:{name}", read)
        for name, read in NATIVE_GAUGES.items():
            yield self._gauge(f"deepinfer:{name}", read)
        for name, (labels, leaf) in LABELLED_COUNTERS.items():
            yield self._labelled(CounterMetricFamily, f"deepinfer:{name}", labels, leaf)
        for name, (labels, leaf) in LABELLED_GAUGES.items():
            yield self._labelled(GaugeMetricFamily, f"deepinfer:{name}", labels, leaf)
        for leaf in HISTOGRAMS:
            yield self._histogram(leaf)
        yield self._tier_hits()
        yield from self._front()
        if "vllm" in self.foreign:
            yield from self._vllm_histograms()
        if "sglang" in self.foreign:
            yield from self._sglang()

    def _sglang(self) -> Iterator[Metric]:
        for name, read in SGLANG_GAUGES.items():
            yield self._gauge(f"sglang:{name}", read)
        yield self._counter("sglang:cached_tokens", COUNTERS["prompt_tokens_cached"])
        family = GaugeMetricFamily("sglang:gen_throughput", "generated tokens per second since the last scrape", labels=LABELS)
        for view in self.pool.ranks:
            total = COUNTERS["generation_tokens"](added(view.stats, view.retired))
            family.add_metric(self._labels(view), self._rates.setdefault(view.rank, Rate()).per_second(total, time.monotonic()))
        yield family

    def _gauge(self, name: str, read: Reader) -> Metric:
        family = GaugeMetricFamily(name, name.partition(":")[2].replace("_", " "), labels=LABELS)
        for view in self.pool.ranks:
            family.add_metric(self._labels(view), read(view.stats))
        return family

    def _counter(self, name: str, read: Reader) -> Metric:
        family = CounterMetricFamily(name, name.partition(":")[2].replace("_", " "), labels=LABELS)
        for view in self.pool.ranks:
            family.add_metric(self._labels(view), read(added(view.stats, view.retired)))
        return family

    def _labelled(self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, labels: tuple[str, ...], leaf: str) -> Metric:
        """A dict of the cache's record, one sample per key. Counters include what earlier incarnations of a rank counted."""
        family = kind(name, name.partition(":")[2].replace("_", " "), labels=(*LABELS, *labels))
        for view in self.pool.ranks:
            record = added(view.stats, view.retired) if kind is CounterMetricFamily else view.stats
            for key, value in (record["prefix_cache"].get(leaf) or {}).items():
                family.add_metric([*self._labels(view), *key.split("/", len(labels) - 1)], value)
        return family

    def _histogram(self, leaf: str) -> Metric:
        """Times that the ranks' caches have sorted by size."""
        name = f"hicache_{leaf}"
        family = HistogramMetricFamily(f"deepinfer:{name}", name.replace("_", " "), labels=LABELS)
        for view in self.pool.ranks:
            cache = added(view.stats, view.retired)["prefix_cache"]
            buckets = list((cache.get(f"{leaf}_buckets_total") or {}).items())
            if buckets:
                family.add_metric(self._labels(view), buckets, cache.get(f"{leaf}_total", 0.0))
        return family

    def _finished(self, name: str) -> Metric:
        family = CounterMetricFamily(name, "finished requests", labels=(*LABELS, "finished_reason"))
        for view in self.pool.ranks:
            for reason in ("stop", "length", "abort", "error"):
                count = self.metrics.finished_by_rank[view.rank, reason]
                if reason == "stop":
                    count += self.metrics.finished_by_rank[view.rank, "tool_calls"]
                family.add_metric([*self._labels(view), reason], count)
        return family

    def _tier_hits(self) -> Metric:
        family = CounterMetricFamily(
            "deepinfer:prefix_cache_hit_tokens", "tokens not computed thanks to the cache", labels=(*LABELS, "tier")
        )
        for view in self.pool.ranks:
            for tier in ("device", "host", "peer", "disk"):
                read = _leaf("prefix_cache", "tiers", tier, "hit_tokens_total")
                family.add_metric([*self._labels(view), tier], read(added(view.stats, view.retired)))
        return family

    def _front(self) -> Iterator[Metric]:
        for name, value in (
            ("requests_received", self.metrics.received_total),
            ("requests_admitted", self.metrics.admitted_total),
            ("rank_deaths", self.metrics.watchdog.deaths_total),
            ("rank_hangs", self.metrics.watchdog.hangs_total),
            ("rank_restarts", self.metrics.watchdog.restarts_total),
            ("slow_readers", self.pool.slow_readers_total),
            ("unknown_fields", self.metrics.unknown_fields_total),
            *((name, self.metrics.oddities[name]) for name in ODDITIES),
        ):
            yield CounterMetricFamily(f"deepinfer:{name}", name.replace("_", " "), value=value)
        yield GaugeMetricFamily("deepinfer:unread_output_bytes", "what waits for clients to read it", value=self.pool.unread_bytes)
        rejected = CounterMetricFamily("deepinfer:requests_rejected", "requests refused, by status", labels=("status",))
        for status, count in sorted(self.metrics.rejected.items()):
            rejected.add_metric([status], count)
        yield rejected

    def _vllm_histograms(self) -> Iterator[Metric]:
        for histogram in self.metrics.histograms.values():
            for family in histogram.collect():
                alias = Metric(family.name.replace("deepinfer:", "vllm:"), family.documentation, family.type)
                for sample in family.samples:
                    alias.add_sample(sample.name.replace("deepinfer:", "vllm:"), sample.labels, sample.value)
                yield alias

    def _labels(self, view: RankView) -> list[str]:
        return [self.metrics.model, str(view.rank)]


def exposition(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)
