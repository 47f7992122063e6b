"""Equal prompts at once: followers wait for one prefill and ask it for a window state where they part from it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from engine.prefix_plan import Match
from engine.request import Sequence
from hicache.config import HiCacheConfig
from hicache.in_flight import InFlightTable, Producer
from hicache.index import StateReason
from hicache.policy import prefill_states, restore_cap


class Herd:
    """Who computes which prefix now, and who waits for it. keep_tokens: prompt tokens that are always recomputed. on_wait: hears of the
    keys of a sequence that begins to wait.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        page_tokens: int,
        keep_tokens: int,
        clock: Callable[[], float],
        on_wait: Callable[[list[bytes]], None] = lambda keys: None,
    ) -> None:
        self._on_wait = on_wait
        self._config, self._page_tokens, self._keep_tokens, self._clock = config, page_tokens, keep_tokens, clock
        self.in_flight = InFlightTable(clock)
        self._leaders: dict[int, Match] = {}
        self._held_since: dict[int, float] = {}

    @property
    def num_held(self) -> int:
        return len(self._held_since)

    def lead(self, seq: Sequence, match: Match, restored: int) -> None:
        """A prefill starts at `restored`: announce what it computes, beyond the pages that are stored already."""
        end_states = frozenset(p for p, _ in prefill_states(seq.prefill_len, self._keep_tokens, self._page_tokens))
        self._leaders[seq.seq_id] = match
        self.in_flight.register(Producer(seq.seq_id, match.keys, end_states, set(match.wanted), restored), len(match.path))

    def holds(self, seq: Sequence, match: Match, tokens: int) -> bool:
        """Whether waiting for a prefill in progress saves at least `herd_min_tokens` over resuming at `tokens` now.

        Asks the producer for a state where the two prompts part, if it has not passed that point: without one its pages are useless.
        """
        least = self._config.herd_min_tokens
        producer = self.in_flight.find(match.keys, len(match.path)) if least else None
        if producer is None or self.in_flight.stalled(producer, self._config.herd_timeout_s):
            return False
        shared = producer.shared_pages(match.keys, len(match.path)) * self._page_tokens
        meeting = min(shared, restore_cap(seq.prefill_len, self._keep_tokens, self._page_tokens))
        if meeting - tokens < least:
            return False
        if producer.reachable(meeting) < meeting and producer.done_tokens < meeting:
            self._ask(producer, meeting)
        if producer.reachable(meeting) - tokens < least:
            return False
        if seq.seq_id not in self._held_since:
            self._held_since[seq.seq_id] = self._clock()
            self._on_wait(match.keys)
        return True

    def _ask(self, producer: Producer, position: int) -> None:
        """Add a chunk end and a state to a running prefill. Its remaining checkpoints are the scheduler's list, kept ascending."""
        match = self._leaders[producer.seq_id]
        match.wanted[position] = StateReason.ASKED
        producer.chunk_states.add(position)
        insort(match.seq.checkpoints, position)

    def progress(self, seq_id: int, end: int) -> None:
        """A chunk of a leader was stored."""
        self.in_flight.progress(seq_id, end)

    def admitted(self, seq_id: int) -> float | None:
        """A sequence is admitted: how long it waited, None if it did not."""
        since = self._held_since.pop(seq_id, None)
        return None if since is None else self._clock() - since

    def drop_leader(self, seq_id: int) -> None:
        """Its prefill is over; whoever waits for it plans anew."""
        self.in_flight.drop(seq_id)
        self._leaders.pop(seq_id, None)

    def forget(self, seq_id: int) -> None:
        """A sequence left without being admitted."""
        self._held_since.pop(seq_id, None)

    def clear(self) -> None:
        """Nobody waits for what was begun before a reset."""
        self.in_flight.clear()
