"""What an engine needs of whatever runs its model."""

from __future__ import annotations

from typing import Any, Protocol

from engine.batch import Batch, StepKind
from engine.models.draft import Choose, DraftSlice


class Runner(Protocol):
    """What the engine needs of a model runner: `run(batch)` gives [R, V] fp32 logits, `run_greedy` these or each row's largest.

    `join` is called instead when this rank has no rows in a step of others. One whose `limits.draft_block_size` is above 0 has `draft`
    as well, see `engine/drafter.py`.
    """

    limits: Any
    kv: Any

    def run(self, batch: Batch) -> Any: ...

    def run_greedy(self, batch: Batch) -> Any: ...

    def draft(self, slices: list[DraftSlice], choose: Choose | None = None) -> Any: ...

    def draft_greedy(self, slices: list[DraftSlice]) -> Any: ...

    def join(self, kind: StepKind) -> None: ...
