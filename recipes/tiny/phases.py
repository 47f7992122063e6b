"""The training schedule."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.tiny.model import DENSE, FILTER, TOPK


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of the backbone.

    lengths: shortest target and longest document, in tokens. truncated: share of longer conversations whose decoder windows start late.
    rounding: KV and index round trips. selections: (share of the phase until which, mode). rates: factor of all learning rates.
    index_every: steps between index losses while attention is dense. report_every: steps between records.
    minimum: accuracy on answers below which a run stops here.
    """

    name: str
    order: int
    mixture: str
    lengths: tuple[int, int]
    truncated: float
    rounding: bool
    selections: tuple[tuple[float, str], ...]
    rates: tuple[float, float]
    warmup: int = 30
    index_every: int = 2
    report_every: int = 25
    minimum: float = 0.0


PHASES = {
    "p1": Phase("p1", 1, "short", (60, 1024), 0.0, False, ((1.0, DENSE),), (1.0, 1.0), warmup=100, minimum=0.8),
    "p2": Phase("p2", 2, "long", (200, 8192), 0.0, True, ((0.8, DENSE), (1.0, TOPK)), (1.0, 0.5)),
    "p3": Phase("p3", 3, "long", (200, 8192), 0.5, True, ((0.05, TOPK), (1.0, FILTER)), (0.7, 0.02)),
}
MINIATURE = {
    "p1": Phase("p1", 1, "short", (60, 256), 0.0, False, ((1.0, DENSE),), (0.5, 0.5), warmup=10, report_every=4),
    "p2": Phase("p2", 2, "short", (60, 256), 0.0, True, ((0.7, DENSE), (1.0, TOPK)), (0.5, 0.3), warmup=5, report_every=4),
    "p3": Phase("p3", 3, "short", (60, 256), 0.5, True, ((0.3, TOPK), (1.0, FILTER)), (0.3, 0.05), warmup=5, report_every=4),
}
