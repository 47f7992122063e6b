"""What the prefix cache found for one sequence, and what the scheduler may do with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache_contract import PlanKind
from engine.request import Sequence
from hicache.index import NONE, StateReason
from hicache.peers import PeerMatch
from hicache.priority import Use


@dataclass(slots=True, eq=False)
class Match:
    """What one sequence found and still pins.

    path: frames of its leading pages; grows as the prefill stores more. num_hit: how many of them were there when it came. num_known: the
    same, and pages that another rank holds, or all of a large prompt that came before. state: the pinned state to restore. replay_end:
    where the pages to restore end when there is no state and the prefill replays the last of them, else 0. wanted: positions where a chunk
    ends and a state is kept, with its reason. peer: leased pages of another rank, when those reach further. plan_seconds: that looking it
    up took.
    """

    seq: Sequence
    epoch: int
    keys: list[bytes] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    num_hit: int = 0
    num_known: int = 0
    state: int = NONE
    replay_end: int = 0
    wanted: dict[int, StateReason] = field(default_factory=dict)
    peer: PeerMatch | None = None
    plan_seconds: float = 0.0

    def use(self) -> Use:
        """How its sequence uses the path."""
        request = self.seq.request
        return Use(request.cache_priority, request.cache_priority_s, self.num_hit, max(0, len(self.path) - self.num_known))


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to `plan`. restore_tokens: where prefill may start (0 unless HIT). reason: of the state or replay, miss or hold."""

    kind: PlanKind
    restore_tokens: int
    reason: str
    match: Match = field(repr=False)
