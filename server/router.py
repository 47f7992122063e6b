"""Which rank gets a request. Pure: no clock, no I/O.

- `affinity`: where its conversation's prefix lies, unless that rank is too busy.
- `least-loaded`: the shortest queue.
- `cost`: the least expected work, by what the ranks' caches really hold (`server/route_cost.py`); affinity decides between equals.

Two kinds of knowledge of conversations, both bounded and least-recently-used first out:
explicit keys (session headers and fields) -> rank, and content keys, hashes of token prefixes at block boundaries and at the ends
of requests. An end that matches says "this continues that very conversation" and is decisive. A match of whole blocks only
may be the system prompt that every agent of a fleet shares, so it never decides; it only counts as the saving of the rank
that the other rules chose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.request import Timing
from server.prompt_keys import BLOCK, PromptKeys, digest, prompt_keys
from server.route_cost import CostModel, RankLoad, Saving, StoredPrefixes

# What one of them takes, measured: a name of a session, an end of a request, a block of 128 tokens.
BYTES_OF_SESSION, BYTES_OF_END, BYTES_OF_BLOCK = 200, 500, 150
# How memory is shared out: most prompts are hundreds of blocks long.
_SHARE_OF_SESSIONS, _SHARE_OF_ENDS = 0.1, 0.2


@dataclass(frozen=True, slots=True)
class Decision:
    """reason: session, content, prefix, load, moved. saved_tokens: prompt tokens that the rank need not compute; source: where they come
    from (see `Saving`).
    """

    rank: int
    reason: str
    saved_tokens: int
    source: str = ""


@dataclass(slots=True)
class RoutingCounts:
    """Decisions by reason: conversation by name, by content, longest prefix, shortest queue, and conversations sent elsewhere."""

    affine_total: int = 0
    content_total: int = 0
    prefix_total: int = 0
    load_total: int = 0
    moved_total: int = 0

    def count(self, reason: str) -> None:
        name = {"session": "affine"}.get(reason, reason) + "_total"
        setattr(self, name, getattr(self, name) + 1)


@dataclass(slots=True)
class Router:
    """One per front; not thread-safe. stored: how to ask the ranks' caches, None while that is not possible.

    most_bytes: about what all that it remembers may take.
    """

    policy: str = "affinity"
    costs: CostModel = field(default_factory=CostModel)
    stored: StoredPrefixes | None = None
    most_bytes: int = 256 * 2**20
    counts: RoutingCounts = field(default_factory=RoutingCounts)
    _sessions: OrderedDict[str, int] = field(default_factory=OrderedDict)
    # (chain hash at the last whole block, tail length) -> {tail hash: rank}; one entry per remembered end
    _ends: OrderedDict[tuple[bytes, int, bytes], int] = field(default_factory=OrderedDict)
    _tails: dict[bytes, dict[int, int]] = field(default_factory=dict)  # chain hash -> {tail length: ends that have it}
    _blocks: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # chain hash -> ranks that hold it, as bits

    @property
    def max_sessions(self) -> int:
        return max(1, int(_SHARE_OF_SESSIONS * self.most_bytes) // BYTES_OF_SESSION)

    @property
    def max_ends(self) -> int:
        return max(1, int(_SHARE_OF_ENDS * self.most_bytes) // BYTES_OF_END)

    @property
    def max_blocks(self) -> int:
        return max(1, int((1 - _SHARE_OF_SESSIONS - _SHARE_OF_ENDS) * self.most_bytes) // BYTES_OF_BLOCK)

    @property
    def num_keys(self) -> int:
        return len(self._sessions) + len(self._ends)

    def route(
        self, session: str | None, keys: PromptKeys, loads: Sequence[RankLoad], tie: str = "", *, reads_cache: bool = True
    ) -> Decision:
        """Choose among `loads` (not empty, alive ranks only) and remember the choice. `tie` orders equal ranks without a session."""
        if self.policy == "least-loaded":
            best = min(loads, key=lambda load: (load.queued_tokens, load.running, load.rank))
            decision = Decision(best.rank, "load", 0)
        elif self.policy == "cost":
            decision = self._cheapest(session, keys, loads, tie, reads_cache)
            self._remember(session, keys, decision.rank)
        else:
            by_rank = {load.rank: load for load in loads}
            affine, reason = self._affine(session, keys, by_rank)
            seed = session or tie or keys.whole.hex()
            best = min(loads, key=lambda load: (load.queued_tokens, load.running, _rendezvous(seed, load.rank)))
            decision = self._guard(affine, reason, best, by_rank, keys)
            self._remember(session, keys, decision.rank)
        self.counts.count(decision.reason)
        return decision

    def _cheapest(self, session: str | None, keys: PromptKeys, loads: Sequence[RankLoad], tie: str, reads_cache: bool) -> Decision:
        """The least cost; ranks within a block of it are equal, and of those the conversation's own is taken."""
        length = len(keys.token_ids)
        by_rank = {load.rank: load for load in loads}
        savings = self._savings(keys, list(by_rank)) if reads_cache else dict.fromkeys(by_rank, Saving())
        costs = {rank: self.costs.cost(length, load, savings[rank]) for rank, load in by_rank.items()}
        least = min(costs.values())
        equals = {rank: load for rank, load in by_rank.items() if costs[rank] <= least + BLOCK}
        affine, reason = self._affine(session, keys, by_rank)
        seed = session or tie or keys.whole.hex()
        rank = affine if affine in equals else min(equals, key=lambda rank: (costs[rank], by_rank[rank].running, _rendezvous(seed, rank)))
        saving = savings[rank]
        if affine is not None and affine != rank:
            reason = "moved"
        elif affine is None:
            reason = "prefix" if saving.tokens else "load"
        return Decision(rank, reason, saving.tokens, saving.source)

    def _savings(self, keys: PromptKeys, ranks: list[int]) -> dict[int, Saving]:
        most = self.costs.most_tokens(keys)
        stored = self.stored.tokens(keys, most) if self.stored is not None and most else {}
        believed = {rank: self.known_tokens(keys, rank) for rank in ranks if rank not in stored} if most else {}
        return self.costs.savings(keys, ranks, stored, believed, self.stored is not None and self.stored.shared)

    def sent(self, name: str, keys: PromptKeys, rank: int) -> None:
        """A request of that name went to `rank`: from now to `computed` its prompt attracts others that share its beginning."""
        if self.policy == "cost":
            self.costs.in_flight.add(name, keys, rank)

    def computed(self, name: str) -> None:
        """A request's prompt is computed, or will never be. Calling it again is harmless."""
        self.costs.in_flight.remove(name)

    def learn(self, source: str, prompt_len: int, cached_tokens: int, timing: Timing) -> None:
        """How long an answer's prompt took, with a saving from where `route` expected it."""
        self.costs.learn(source, prompt_len, cached_tokens, timing)

    def _affine(self, session: str | None, keys: PromptKeys, by_rank: dict[int, RankLoad]) -> tuple[int | None, str]:
        if session is not None and self._sessions.get(session) in by_rank:
            return self._sessions[session], "session"
        end = self._matching_end(keys)
        return (end, "content") if end in by_rank else (None, "load")

    def _guard(self, affine: int | None, reason: str, best: RankLoad, by_rank: dict[int, RankLoad], keys: PromptKeys) -> Decision:
        """Stay with the affine rank unless its queue is longer than the best one's by more than the cache saves."""
        if affine is None:
            return Decision(best.rank, "load", self.known_tokens(keys, best.rank))
        saved = self.known_tokens(keys, affine)
        saved_there = self.known_tokens(keys, best.rank)
        if best.rank != affine and by_rank[affine].queued_tokens - best.queued_tokens > saved - saved_there:
            return Decision(best.rank, "moved", saved_there)
        return Decision(affine, reason, saved)

    def known_tokens(self, keys: PromptKeys, rank: int) -> int:
        """Leading tokens, in whole blocks, that the rank is believed to hold."""
        known = 0
        for index in range(1, len(keys.chain)):
            if not self._blocks.get(keys.chain[index], 0) >> rank & 1:
                break
            known = index * BLOCK
        return known

    def finished(self, token_ids: Sequence[int], prompt_len: int, rank: int, salt: str = "") -> None:
        """A request ended well: its sequence, and its prompt without the generation header, are ends that the next turn may continue."""
        self.ended(prompt_keys(token_ids, salt), prompt_len, rank)

    def ended(self, keys: PromptKeys, prompt_len: int, rank: int) -> None:
        """`finished` for a sequence that has been hashed already."""
        if self.policy == "least-loaded":
            return
        self._add_blocks(keys, rank)
        # The header's think token is rewritten by later turns, so the prompt is remembered without it.
        for length in {len(keys.token_ids), prompt_len - 1}:
            if length > 0:
                self._add_end(keys, length, rank)

    def forget(self, ranks: Iterable[int]) -> None:
        """Dead or draining ranks lose their keys at once."""
        gone = set(ranks)
        self.costs.in_flight.forget(gone)
        self._sessions = OrderedDict((key, rank) for key, rank in self._sessions.items() if rank not in gone)
        for end in [end for end, rank in self._ends.items() if rank in gone]:
            self._drop_end(end)
        left = ~sum(1 << rank for rank in gone)
        self._blocks = OrderedDict((block, ranks & left) for block, ranks in self._blocks.items() if ranks & left)

    def _matching_end(self, keys: PromptKeys) -> int | None:
        for index in range(len(keys.chain) - 1, -1, -1):
            start = index * BLOCK
            for tail in sorted(self._tails.get(keys.chain[index], {}), reverse=True):
                if start + tail > len(keys.token_ids):
                    continue
                end = (keys.chain[index], tail, digest(b"tail", keys.token_ids[start : start + tail]))
                if end in self._ends:
                    self._ends.move_to_end(end)
                    return self._ends[end]
        return None

    def _remember(self, session: str | None, keys: PromptKeys, rank: int) -> None:
        if session is not None:
            self._sessions[session] = rank
            self._sessions.move_to_end(session)
            if len(self._sessions) > self.max_sessions:
                self._sessions.popitem(last=False)
        self._add_blocks(keys, rank)

    def _add_blocks(self, keys: PromptKeys, rank: int) -> None:
        for block in keys.chain[1:]:
            self._blocks[block] = self._blocks.get(block, 0) | 1 << rank
            self._blocks.move_to_end(block)
        most = self.max_blocks
        while len(self._blocks) > most:
            self._blocks.popitem(last=False)

    def _add_end(self, keys: PromptKeys, length: int, rank: int) -> None:
        index = length // BLOCK
        tail = length - index * BLOCK
        end = (keys.chain[index], tail, digest(b"tail", keys.token_ids[index * BLOCK : length]))
        if end not in self._ends:
            tails = self._tails.setdefault(keys.chain[index], {})
            tails[tail] = tails.get(tail, 0) + 1
        self._ends[end] = rank
        self._ends.move_to_end(end)
        if len(self._ends) > self.max_ends:
            self._drop_end(next(iter(self._ends)))

    def _drop_end(self, end: tuple[bytes, int, bytes]) -> None:
        del self._ends[end]
        block, tail, _ = end
        tails = self._tails[block]
        tails[tail] -= 1
        if not tails[tail]:
            del tails[tail]
        if not tails:
            del self._tails[block]


def _rendezvous(key: str, rank: int) -> bytes:
    """A fixed order of ranks per key: the same key meets the same rank as long as that rank is there."""
    return blake2b(f"{key}\0{rank}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
