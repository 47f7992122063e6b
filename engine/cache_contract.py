"""What the scheduler asks of a prefix cache, and the cache that stores nothing. `engine/prefix_cache.py` is the real one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from engine.errors import ConfigError
from engine.request import Sequence


class PlanKind(StrEnum):
    """What the scheduler may do with a sequence without blocks: admit it, with or without a restore, or let others pass meanwhile."""

    HIT = "hit"
    MISS = "miss"
    HOLD = "hold"


class PrefixCacheLike(Protocol):
    """One thread, never blocks. Every sequence handed to `restore` reaches `finish` on every exit path.

    A plan is the cache's own record; the scheduler reads only its `kind`.
    """

    def begin_step(self, *, decoding: bool = False) -> None:
        """A scheduling step begins: what it may restore is bounded, and more so while other sequences are `decoding`."""

    def plan(self, seq: Sequence) -> Any:
        """Match a sequence without blocks; what matched is pinned until `restore` or `abandon`."""

    def abandon(self, plan: Any) -> None:
        """The scheduler cannot admit now: unpin, move no counter."""

    def restore(self, seq: Sequence, plan: Any) -> None:
        """Blocks and state slot are allocated: enqueue the copies, set `num_computed` and (once) `cached_tokens`. Also for a miss."""

    def checkpoints(self, seq: Sequence) -> list[int]:
        """Ascending positions where a chunk must end."""

    def store_chunk(self, seq: Sequence, start: int, end: int) -> None:
        """Tokens [start, end) of a prefill were computed."""

    def finish(self, seq: Sequence) -> None:
        """The sequence leaves its blocks (done, aborted or preempted). Idempotent, called before the blocks are freed."""

    def reset(self) -> None:
        """Forget everything stored."""

    def explain(self, tokens: list[int], salt: str = "", scope: str = "") -> dict[str, Any]:
        """What a prompt would restore now, and why not more. scope: see `Request.cache_scope`. Changes nothing."""

    def keep(self, tokens: list[int], salt: str, ttl_s: float) -> dict[str, Any]:
        """Pin what is stored of a prompt for a time. Raises ConfigError beyond the share that may be pinned."""

    def inject_fault(
        self, kind: str, *, target: str = "page", page: int = -1, byte: int | None = None, count: int = 1, seconds: float = 0.005
    ) -> dict[str, Any]:
        """Break something on purpose. Raises ConfigError when that is not possible."""

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None:
        """The engine ends. Idempotent."""


@dataclass(frozen=True, slots=True)
class NoPlan:
    kind: PlanKind = PlanKind.MISS


class NoPrefixCache:
    """Misses always; the twin that tests compare the real cache with."""

    _plan = NoPlan()

    def begin_step(self, *, decoding: bool = False) -> None:
        return None

    def plan(self, seq: Sequence) -> NoPlan:
        return self._plan

    def abandon(self, plan: Any) -> None:
        return None

    def restore(self, seq: Sequence, plan: Any) -> None:
        if seq.cached_tokens is None:
            seq.cached_tokens = 0

    def checkpoints(self, seq: Sequence) -> list[int]:
        return []

    def store_chunk(self, seq: Sequence, start: int, end: int) -> None:
        return None

    def finish(self, seq: Sequence) -> None:
        return None

    def reset(self) -> None:
        return None

    def explain(self, tokens: list[int], salt: str = "", scope: str = "") -> dict[str, Any]:
        return {"prompt_tokens": len(tokens), "restore_tokens": 0, "miss": "off"}

    def keep(self, tokens: list[int], salt: str, ttl_s: float) -> dict[str, Any]:
        raise ConfigError("there is no host cache to pin prefixes in", hint="--hicache-size-gb")

    def inject_fault(
        self, kind: str, *, target: str = "page", page: int = -1, byte: int | None = None, count: int = 1, seconds: float = 0.005
    ) -> dict[str, Any]:
        raise ConfigError(f"fault {kind!r} is not possible here", hint="it needs a host cache: --hicache-size-gb")

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return None
