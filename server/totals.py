"""Arithmetic on the ranks' statistics records: nested dicts of numbers whose `*_total` leaves only grow."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]


def _tier() -> Record:
    return {"hit_tokens_total": 0, "store_tokens_total": 0, "tokens_used": 0}


def empty_record() -> Record:
    """A rank that has not reported yet: every leaf of the JSON metrics, zero."""
    return {
        "steps_total": 0,
        "running": 0,
        "waiting": 0,
        "preemptions_total": 0,
        "kv": {"tokens_total": 0, "tokens_used": 0},
        "tokens": {"prompt_total": 0, "cached_total": 0, "generated_total": 0},
        "prefix_cache": {
            "lookups_total": 0,
            "lookup_tokens_total": 0,
            "hits_total": 0,
            "hit_tokens_total": 0,
            "stores_total": 0,
            "store_tokens_total": 0,
            "evictions_total": 0,
            "evicted_tokens_total": 0,
            "tiers": {"device": _tier(), "host": _tier(), "peer": _tier(), "disk": _tier()},
        },
        "spec": {"drafts_total": 0, "draft_tokens_total": 0, "accepted_tokens_total": 0},
    }


def merged(base: Record, update: Record) -> Record:
    """`base` with the leaves of `update` in place of its own; leaves that are not numbers are dropped."""
    result = dict(base)
    for key, value in update.items():
        if isinstance(value, dict):
            inner = result.get(key)
            result[key] = merged(inner if isinstance(inner, dict) else {}, value)
        elif isinstance(value, (int, float)) and value == value:
            result[key] = value
    return result


def added(left: Record, right: Record) -> Record:
    """Leaf by leaf sum; a leaf missing on one side counts as zero."""
    result = dict(left)
    for key, value in right.items():
        if isinstance(value, dict):
            result[key] = added(result.get(key, {}), value)
        else:
            result[key] = result.get(key, 0) + value
    return result


def counters_only(record: Record, counting: bool = False) -> Record:
    """The record of a rank that is gone: its counters stay, its gauges are zero. All leaves of a `*_total` dict are counters."""
    result: Record = {}
    for key, value in record.items():
        is_counter = counting or key.endswith("_total")
        if isinstance(value, dict):
            # The capacity `kv.tokens_total` is a gauge in spite of its name.
            result[key] = dict.fromkeys(value, 0) if key == "kv" else counters_only(value, is_counter)
        else:
            result[key] = value if is_counter else 0
    return result


def without_baseline(record: Record, baseline: Record, counting: bool = False) -> Record:
    """The record without what its counters had reached in `baseline`: `*_total` leaves, and all leaves of a `*_total` dict.

    The capacity `kv.tokens_total` is no counter, and steps are counted from the start.
    """
    result: Record = {}
    for key, value in record.items():
        base, is_counter = baseline.get(key), counting or key.endswith("_total")
        if isinstance(value, dict):
            result[key] = value if key == "kv" else without_baseline(value, base if isinstance(base, dict) else {}, is_counter)
        elif is_counter and key != "steps_total" and isinstance(base, (int, float)):
            result[key] = value - base
        else:
            result[key] = value
    return result
