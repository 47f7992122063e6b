"""The inputs of one forward step, as plain host data. `engine/models/inputs.py` turns them into tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class StepKind(StrEnum):
    """All sequences of a step are of one kind."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


class LogitRows(StrEnum):
    """Which rows of a slice need logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class SequenceSlice(msgspec.Struct, frozen=True, gc=False):
    """The part of one sequence that a step computes: `token_ids` at positions start, start+1, ...

    One is made per sequence and step: a struct costs a fifth of a dataclass, and holds no cycles for the collector to look for.

    total_len: tokens of the sequence known at this step (L_total of decoder truncation; ignored in decode).
    history: up to (max n-gram - 1) token ids right before `start`, oldest first, for the n-gram tables.
    swa_valid_start: first position whose window rows are valid (0 normally).
    restored: leading tokens that came from the prefix cache right before this slice. It begins behind them, or replays the last of them.
    entries_start: first position whose compressed entries the step writes (0 normally); those before it are in the blocks and stay.
    """

    token_ids: list[int]
    start: int
    total_len: int
    block_table: list[int]
    state_slot: int
    history: tuple[int, ...] = ()
    swa_valid_start: int = 0
    logit_rows: LogitRows = LogitRows.LAST
    restored: int = 0
    entries_start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens of a decode step that only the device knows yet: what stands in the slice is a placeholder.

    rows: for each slice the index of its token in `ids`, -1 when the slice has it. ids: [R] int64 on the device.
    """

    rows: list[int]
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: its kind and the slices, in the order in which logits come back. late: only in decode steps of one row per slice."""

    kind: StepKind
    slices: list[SequenceSlice]
    late: LateTokens | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)
