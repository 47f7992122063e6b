"""Names and units of the engine's counters, and the record that one rank reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a rank's record: where it stands (dotted path), its unit and what it counts. `*_total` never falls."""

    path: str
    unit: str
    help: str


METRICS = (
    Metric("steps_total", "steps", "Steps taken with the group, those without own work included."),
    Metric("prompt_steps_total", "steps", "Prompt steps among them."),
    Metric("running", "sequences", "Sequences that decode."),
    Metric("waiting", "sequences", "Sequences that wait for a prompt step, or for its next chunk."),
    Metric("compiling", "boolean", "1 while compiled steps are being built and steps run eagerly."),
    Metric("preemptions_total", "sequences", "Running sequences whose blocks were taken away."),
    Metric("kv.tokens_total", "tokens", "Tokens that the device cache can hold."),
    Metric("kv.tokens_used", "tokens", "Tokens' worth of blocks that sequences own."),
    Metric("tokens.prompt_total", "tokens", "Prompt tokens of requests that had their first output."),
    Metric("tokens.cached_total", "tokens", "Prompt tokens among them that came from the prefix cache."),
    Metric("tokens.generated_total", "tokens", "Tokens produced."),
    Metric("tokens.prefilled_total", "tokens", "Tokens computed in prompt steps, recomputed ones included."),
    Metric("prefix_cache.lookups_total", "requests", "Requests that looked into the prefix cache."),
    Metric("prefix_cache.lookup_tokens_total", "tokens", "Prompt tokens of these."),
    Metric("prefix_cache.hits_total", "requests", "Lookups that restored something."),
    Metric("prefix_cache.hit_tokens_total", "tokens", "Prompt tokens restored instead of computed."),
    Metric("prefix_cache.stores_total", "pages", "Pages stored."),
    Metric("prefix_cache.store_tokens_total", "tokens", "Tokens stored."),
    Metric("prefix_cache.evictions_total", "pages", "Pages dropped for room."),
    Metric("prefix_cache.evicted_tokens_total", "tokens", "Tokens dropped for room."),
    Metric("spec.drafts_total", "verifications", "Verifications of a sequence's drafted tokens."),
    Metric("spec.draft_tokens_total", "tokens", "Drafted tokens that were verified."),
    Metric("spec.accepted_tokens_total", "tokens", "Drafted tokens that were kept."),
    Metric("experts.balance", "ratio", "Tokens of the busiest rank over the mean, layer by layer; 0 while all ranks have all experts."),
    Metric("experts.plans_total", "plans", "New placements of shared experts."),
    Metric("experts.moved_layers_total", "layers", "Layers whose experts moved."),
    Metric("experts.moved_bytes_total", "bytes", "Expert weights that came from other ranks."),
)
# Besides these, `spec.verified_by_place_total` and `spec.accepted_by_place_total`: tokens by place in the drafted block, from "1".
TIERS = ("device", "host", "disk")
TIER_LEAVES = ("hit_tokens_total", "store_tokens_total", "tokens_used")


def rank_record(scheduler: Scheduler, steps: int, cache_stats: dict[str, Any], expert_stats: dict[str, float]) -> dict[str, Any]:
    """One rank's figures: every path of `METRICS` is there as a number, plus what the prefix cache adds of its own."""
    counters = scheduler.counters
    record: dict[str, Any] = {}
    for metric in METRICS:
        _put(record, metric.path, 0)
    record["prefix_cache"]["tiers"] = {tier: dict.fromkeys(TIER_LEAVES, 0) for tier in TIERS}
    _merge(record["prefix_cache"], cache_stats)
    _merge(record["experts"], expert_stats)
    for path, value in (
        ("steps_total", steps),
        ("prompt_steps_total", counters.prompt_steps),
        ("running", len(scheduler.running)),
        ("waiting", len(scheduler.waiting)),
        ("preemptions_total", counters.preemptions),
        ("kv.tokens_total", scheduler.blocks.tokens_total),
        ("kv.tokens_used", scheduler.blocks.tokens_used),
        ("tokens.prompt_total", counters.prompt_tokens),
        ("tokens.cached_total", counters.cached_tokens),
        ("tokens.generated_total", counters.generated_tokens),
        ("tokens.prefilled_total", counters.computed_prefill_tokens),
        ("spec.drafts_total", counters.verifications),
        ("spec.draft_tokens_total", sum(counters.verified_at)),
        ("spec.accepted_tokens_total", sum(counters.accepted_at)),
    ):
        _put(record, path, value)
    for name, by_place in (("verified", counters.verified_at), ("accepted", counters.accepted_at)):
        record["spec"][f"{name}_by_place_total"] = {str(place): count for place, count in enumerate(by_place, 1)}
    return record


def _put(record: dict[str, Any], path: str, value: int | float) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        record = record.setdefault(name, {})
    record[leaf] = value


def _merge(into: dict[str, Any], extra: dict[str, Any]) -> None:
    """Lay `extra` over `into`, branch by branch."""
    for name, value in extra.items():
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value
