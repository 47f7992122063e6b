"""What a prompt would cost on each rank, in computed prompt tokens. Pure: no clock, no I/O.

    cost = prompt tokens queued there + tokens to compute + tokens to restore x their price + running sequences x theirs

The tokens to restore are those that the rank's own cache holds, those that another rank of the host holds and this one would copy, or
those that a prompt in front of it is computing right now, whichever saves most.
Source: `hicache` 11.1, argmin over ranks of queued + (N - hit) + lambda * running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.request import Timing
from hicache.policy import restore_cap
from server.prompt_keys import BLOCK, PromptKeys

# A running sequence makes every step of its rank a little longer until it ends; a page's worth of prefill is of that order. The choice
# is flat: 16 to 256 give the same picture in the simulation.
RUNNING_TOKENS = 64.0
FIRST_PRICE = 0.02  # of a restored token, until enough answers have told
_ENOUGH_TOKENS = 4096
_FADE = 0.98  # per answer: the last 50 or so decide


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A rank that takes requests. `queued_tokens`: prompt tokens accepted but not prefilled. `running`: sequences it holds."""

    rank: int
    queued_tokens: int = 0
    running: int = 0


def shared_queues(queued: Sequence[int], cp: int) -> list[int]:
    """Prompt tokens in front of a new one on each rank, when `cp` consecutive ranks compute all their prompts together."""
    groups = [queued[first : first + cp] for first in range(0, len(queued), cp)]
    return [sum(group) // len(group) for group in groups for _ in group]


class StoredPrefixes(Protocol):
    """What the ranks' caches hold."""

    shared: bool  # ranks restore from each other

    def __len__(self) -> int:
        """Number of ranks that can be asked."""

    def tokens(self, keys: PromptKeys, most_tokens: int) -> Mapping[int, int]:
        """Leading tokens that each rank could restore from its own cache; ranks that cannot be asked are absent."""


@dataclass(frozen=True, slots=True)
class RestoreRule:
    """When a prefix is restored at all; the values of the engine and cache settings of the same names. Tokens."""

    keep_tokens: int = 0
    min_restore_tokens: int = BLOCK
    herd_min_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class Saving:
    """`tokens` of a prompt that a rank need not compute. source: own, peer, in_flight, or "" for none."""

    tokens: int = 0
    source: str = ""


class InFlightPrefixes:
    """Prefixes of prompts that were sent to a rank and are not computed yet: a herd must meet there instead of spreading."""

    def __init__(self) -> None:
        self._chains: dict[str, tuple[int, list[bytes]]] = {}
        self._counts: dict[bytes, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, name: str, keys: PromptKeys, rank: int) -> None:
        """The prompt of request `name` is on its way to `rank`."""
        self._chains[name] = rank, keys.chain[1:]
        for key in keys.chain[1:]:
            self._counts.setdefault(key, Counter())[rank] += 1

    def remove(self, name: str) -> None:
        """Its prefill is over, or it will never happen. Unknown names are ignored."""
        rank, chain = self._chains.pop(name, (0, []))
        for key in chain:
            counts = self._counts[key]
            counts[rank] -= 1
            if not counts[rank]:
                del counts[rank]
            if not counts:
                del self._counts[key]

    def forget(self, ranks: set[int]) -> None:
        """These ranks compute nothing any more."""
        for name in [name for name, (rank, _) in self._chains.items() if rank in ranks]:
            self.remove(name)

    def tokens(self, keys: PromptKeys, rank: int) -> int:
        """Leading tokens, in whole blocks, that prompts on their way to `rank` have in common with this one."""
        shared = 0
        for index in range(1, len(keys.chain)):
            if rank not in self._counts.get(keys.chain[index], ()):
                break
            shared = index * BLOCK
        return shared


@dataclass(slots=True)
class Price:
    """Seconds per token of one kind, over the last answers."""

    seconds: float = 0.0
    tokens: float = 0.0

    def learn(self, seconds: float, tokens: int) -> None:
        self.seconds = self.seconds * _FADE + seconds
        self.tokens = self.tokens * _FADE + tokens

    @property
    def known(self) -> bool:
        return self.tokens >= _ENOUGH_TOKENS and self.seconds > 0


@dataclass(slots=True)
class CostModel:
    """Estimates of one front. rule: None when the ranks have no cache."""

    rule: RestoreRule | None = field(default_factory=RestoreRule)
    running_tokens: float = RUNNING_TOKENS
    in_flight: InFlightPrefixes = field(default_factory=InFlightPrefixes)
    computed: Price = field(default_factory=Price)
    restored: dict[str, Price] = field(default_factory=lambda: {"own": Price(), "peer": Price()})

    def learn(self, source: str, prompt_len: int, cached_tokens: int, timing: Timing) -> None:
        """An answer told how long its prompt took. source: of the saving that was expected."""
        self.computed.learn(timing.prefill_s, prompt_len - cached_tokens)
        if cached_tokens:
            self.restored["peer" if source == "peer" else "own"].learn(timing.restore_s, cached_tokens)

    def price(self, source: str) -> float:
        """A restored token in computed ones, 0 to 1."""
        restored = self.restored["peer" if source == "peer" else "own"]
        if not (restored.known and self.computed.known):
            return FIRST_PRICE
        return min(1.0, (restored.seconds / restored.tokens) / (self.computed.seconds / self.computed.tokens))

    def most_tokens(self, keys: PromptKeys) -> int:
        """The longest prefix of a prompt that any cache may restore; 0 when it is too short to be restored at all."""
        if self.rule is None:
            return 0
        cap = restore_cap(len(keys.token_ids), self.rule.keep_tokens, BLOCK)
        return cap if cap >= self.rule.min_restore_tokens else 0

    def savings(
        self, keys: PromptKeys, ranks: Sequence[int], stored: Mapping[int, int], believed: Mapping[int, int], shared: bool
    ) -> dict[int, Saving]:
        """The best saving on each of `ranks`. stored: what caches were found to hold; believed: of ranks that could not be asked."""
        rule = self.rule
        cap = self.most_tokens(keys)
        if rule is None or cap == 0:
            return dict.fromkeys(ranks, Saving())
        peers = max(stored.values(), default=0) if shared else 0
        result = {}
        for rank in ranks:
            own = stored[rank] if rank in stored else min(cap, believed.get(rank, 0))
            options = [Saving(own, "own")] if own >= rule.min_restore_tokens else [Saving()]
            if rank in stored and peers >= max(own + BLOCK, rule.min_restore_tokens):
                options.append(Saving(peers, "peer"))
            coming = min(cap, self.in_flight.tokens(keys, rank))
            if rule.herd_min_tokens and coming >= options[-1].tokens + rule.herd_min_tokens:
                options.append(Saving(coming, "in_flight"))
            result[rank] = max(options, key=lambda saving: saving.tokens * (1 - self.price(saving.source)))
        return result

    def work(self, prompt_len: int, saving: Saving) -> float:
        """The prompt alone, in computed tokens."""
        return prompt_len - saving.tokens * (1 - self.price(saving.source))

    def cost(self, prompt_len: int, load: RankLoad, saving: Saving) -> float:
        return load.queued_tokens + self.work(prompt_len, saving) + self.running_tokens * load.running
