"""Which prefixes are being computed right now, so that equal prompts wait for one prefill instead of each doing their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Producer:
    """A sequence in prefill whose pages others may want.

    keys: all its page keys. end_states: positions whose windows are kept when its prefill ends. chunk_states: positions where a
    chunk ends and a window is kept. done_tokens: prefilled so far.
    """

    seq_id: int
    keys: list[bytes]
    end_states: frozenset[int]
    chunk_states: set[int] = field(default_factory=set)
    done_tokens: int = 0
    progress_s: float = 0.0

    def reachable(self, limit: int) -> int:
        """The deepest position up to `limit` at which this producer will still leave a state; 0 for none."""
        coming = [p for p in self.chunk_states if self.done_tokens < p <= limit]
        return max([*coming, *(p for p in self.end_states if p <= limit)], default=0)

    def shared_pages(self, keys: Sequence[bytes], begin: int) -> int:
        """Leading pages that `keys` has in common with this producer, known to agree before page `begin`."""
        end = begin
        for mine, theirs in zip(self.keys[begin:], keys[begin:], strict=False):
            if mine != theirs:
                break
            end += 1
        return end


class InFlightTable:
    """page key -> the sequence that computes it. The first producer of a key keeps it; entries end with their producer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._owner: dict[bytes, Producer] = {}
        self._producers: dict[int, Producer] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def register(self, producer: Producer, first_page: int) -> None:
        """Announce the pages from `first_page` on."""
        producer.progress_s = self._clock()
        self._producers[producer.seq_id] = producer
        for key in producer.keys[first_page:]:
            self._owner.setdefault(key, producer)

    def find(self, keys: Sequence[bytes], num_stored: int) -> Producer | None:
        """Who computes the page after the `num_stored` stored ones, or stored the last of them and still has states to leave."""
        for page in (num_stored, num_stored - 1):
            if 0 <= page < len(keys) and keys[page] in self._owner:
                return self._owner[keys[page]]
        return None

    def progress(self, seq_id: int, done_tokens: int) -> None:
        """A chunk of the producer was stored."""
        producer = self._producers.get(seq_id)
        if producer is not None:
            producer.done_tokens, producer.progress_s = done_tokens, self._clock()

    def stalled(self, producer: Producer, timeout_s: float) -> bool:
        """Whether the producer has stored nothing for `timeout_s`: whoever waits for it goes on alone."""
        return self._clock() - producer.progress_s > timeout_s

    def drop(self, seq_id: int) -> None:
        """The producer ended its prefill or its life. Whoever waits for it finds it gone and plans anew."""
        producer = self._producers.pop(seq_id, None)
        if producer is None:
            return
        for key in producer.keys:
            if self._owner.get(key) is producer:
                del self._owner[key]

    def clear(self) -> None:
        self._owner.clear()
        self._producers.clear()
