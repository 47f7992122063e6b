"""Which rank gets a request: where its conversation's prefix lies, unless that rank is too busy. Pure: no clock, no I/O.

Two kinds of knowledge, both bounded and least-recently-used first out:
explicit keys (session headers and fields) -> rank, and content keys, hashes of token prefixes at block boundaries and at the ends
of requests. An end that matches says "this continues that very conversation" and is decisive. A match of whole blocks only
may be the system prompt that every agent of a fleet shares, so it never decides; it only counts as the saving of the rank
that the other rules chose.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

BLOCK = 128
MAX_SESSIONS = 65_536
MAX_ENDS = 65_536
MAX_BLOCKS = 1_048_576


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A rank that takes requests. `queued_tokens`: prompt tokens accepted but not prefilled. `running`: sequences it holds."""

    rank: int
    queued_tokens: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Hashes of a token sequence: `chain[i]` covers the first i blocks, `whole` all of it. Long prompts are hashed off the event loop."""

    token_ids: Sequence[int]
    chain: list[bytes]
    whole: bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """reason: session, content, load, moved. `saved_tokens`: prompt tokens that the rank is believed to have cached."""

    rank: int
    reason: str
    saved_tokens: int


@dataclass(slots=True)
class RoutingCounts:
    affine_total: int = 0
    content_total: int = 0
    load_total: int = 0
    moved_total: int = 0


def prompt_keys(token_ids: Sequence[int], salt: str = "") -> PromptKeys:
    """salt: the request's cache salt. Prompts with different salts share nothing on any rank, so they must not attract each other."""
    chain = [salt.encode()]
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        chain.append(_digest(chain[-1], token_ids[start : start + BLOCK]))
    return PromptKeys(token_ids, chain, _digest(b"whole" + chain[0], token_ids))


def _digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


@dataclass(slots=True)
class Router:
    """One per front; not thread-safe. `policy` is "affinity" or "least-loaded"."""

    policy: str = "affinity"
    max_sessions: int = MAX_SESSIONS
    max_ends: int = MAX_ENDS
    max_blocks: int = MAX_BLOCKS
    counts: RoutingCounts = field(default_factory=RoutingCounts)
    _sessions: OrderedDict[str, int] = field(default_factory=OrderedDict)
    # (chain hash at the last whole block, tail length) -> {tail hash: rank}; one entry per remembered end
    _ends: OrderedDict[tuple[bytes, int, bytes], int] = field(default_factory=OrderedDict)
    _tails: dict[bytes, dict[int, int]] = field(default_factory=dict)  # chain hash -> {tail length: ends that have it}
    _blocks: OrderedDict[bytes, set[int]] = field(default_factory=OrderedDict)

    @property
    def num_keys(self) -> int:
        return len(self._sessions) + len(self._ends)

    def route(self, session: str | None, keys: PromptKeys, loads: Sequence[RankLoad], tie: str = "") -> Decision:
        """Choose among `loads` (not empty, alive ranks only) and remember the choice. `tie` orders equal ranks without a session."""
        by_rank = {load.rank: load for load in loads}
        if self.policy == "least-loaded":
            best = min(loads, key=lambda load: (load.queued_tokens, load.running, load.rank))
            self.counts.load_total += 1
            return Decision(best.rank, "load", 0)
        affine, reason = self._affine(session, keys, by_rank)
        seed = session or tie or keys.whole.hex()
        best = min(loads, key=lambda load: (load.queued_tokens, load.running, _rendezvous(seed, load.rank)))
        decision = self._guard(affine, reason, best, by_rank, keys)
        self._remember(session, keys, decision.rank)
        return decision

    def _affine(self, session: str | None, keys: PromptKeys, by_rank: dict[int, RankLoad]) -> tuple[int | None, str]:
        if session is not None and self._sessions.get(session) in by_rank:
            return self._sessions[session], "session"
        end = self._matching_end(keys)
        return (end, "content") if end in by_rank else (None, "load")

    def _guard(self, affine: int | None, reason: str, best: RankLoad, by_rank: dict[int, RankLoad], keys: PromptKeys) -> Decision:
        """Stay with the affine rank unless its queue is longer than the best one's by more than the cache saves."""
        if affine is None:
            self.counts.load_total += 1
            return Decision(best.rank, "load", self.known_tokens(keys, best.rank))
        saved = self.known_tokens(keys, affine)
        saved_there = self.known_tokens(keys, best.rank)
        if best.rank != affine and by_rank[affine].queued_tokens - best.queued_tokens > saved - saved_there:
            self.counts.moved_total += 1
            return Decision(best.rank, "moved", saved_there)
        if reason == "session":
            self.counts.affine_total += 1
        else:
            self.counts.content_total += 1
        return Decision(affine, reason, saved)

    def known_tokens(self, keys: PromptKeys, rank: int) -> int:
        """Leading tokens, in whole blocks, that the rank is believed to hold."""
        known = 0
        for index in range(1, len(keys.chain)):
            if rank not in self._blocks.get(keys.chain[index], ()):
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
        self._sessions = OrderedDict((key, rank) for key, rank in self._sessions.items() if rank not in gone)
        for end in [end for end, rank in self._ends.items() if rank in gone]:
            self._drop_end(end)
        for holders in self._blocks.values():
            holders -= gone

    def _matching_end(self, keys: PromptKeys) -> int | None:
        for index in range(len(keys.chain) - 1, -1, -1):
            start = index * BLOCK
            for tail in sorted(self._tails.get(keys.chain[index], {}), reverse=True):
                if start + tail > len(keys.token_ids):
                    continue
                end = (keys.chain[index], tail, _digest(b"tail", keys.token_ids[start : start + tail]))
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
            self._blocks.setdefault(block, set()).add(rank)
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)

    def _add_end(self, keys: PromptKeys, length: int, rank: int) -> None:
        index = length // BLOCK
        tail = length - index * BLOCK
        end = (keys.chain[index], tail, _digest(b"tail", keys.token_ids[index * BLOCK : length]))
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
