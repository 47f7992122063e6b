"""Which interval is best: the fastest among those that keep the limit, and the one nearest the default where runs cannot tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_cli.report.intervals import mean_interval, welch_ratio
from deepinfer_cli.tune.measure import Measurement

OBJECTIVES = {"ttft": ("ttft_p90_ms", False), "throughput": ("output_tok_s", True)}
LONE = ("lone_ttft_ms", False)


@dataclass(frozen=True, slots=True)
class Choice:
    """value None: no interval keeps the limit. verdicts: a word or two for every measured value, in order."""

    value: int | None
    reason: str
    verdicts: list[str]


def choose(
    measured: Sequence[Measurement], *, objective: str = "ttft", itl_p99_ms: float | None = None, default: int = 2, confidence: float = 0.95
) -> Choice:
    """Lowest TTFT p90 (or highest throughput) under the load; without a load, the lowest TTFT of a lone request."""
    name, higher = OBJECTIVES[objective]
    if not any(m.values(name) for m in measured):
        name, higher = LONE
    kept = [m for m in measured if m.values(name) and (itl_p99_ms is None or _upper(m, confidence) <= itl_p99_ms)]
    verdicts = {m.value: "" if m in kept else "over the ITL limit" for m in measured}
    if not kept:
        return Choice(None, f"no interval keeps ITL p99 under {itl_p99_ms:,.1f} ms", [verdicts[m.value] for m in measured])
    best = (max if higher else min)(kept, key=lambda m: m.mean(name) or 0.0)
    equal = [m for m in kept if m is best or _cannot_tell(best, m, name, confidence)]
    chosen = min(equal, key=lambda m: abs(m.value - default))
    for m in kept:
        verdicts[m.value] = "chosen" if m is chosen else "cannot tell from the best" if m in equal else "slower"
    reason = _reason(chosen, best, equal, objective if name != LONE[0] else "lone", default)
    return Choice(chosen.value, reason, [verdicts[m.value] for m in measured])


def _upper(m: Measurement, confidence: float) -> float:
    """Upper end of the interval of ITL p99 between runs; of one run, the value itself."""
    values = m.values("itl_p99_ms")
    interval = mean_interval(values, confidence)
    return interval.high if interval is not None else max(values, default=0.0)


def _cannot_tell(best: Measurement, other: Measurement, name: str, confidence: float) -> bool:
    interval = welch_ratio(best.values(name), other.values(name), confidence)
    return interval is not None and interval.low <= 0 <= interval.high


def _reason(chosen: Measurement, best: Measurement, equal: Sequence[Measurement], objective: str, default: int) -> str:
    what = {"ttft": "lowest TTFT p90 under the load", "throughput": "most output tokens a second", "lone": "lowest TTFT of a lone request"}
    if chosen is best:
        return what[objective]
    others = ", ".join(str(m.value) for m in equal if m is not chosen)
    return f"cannot tell it from {others}; nearest the default of {default}"
