"""Why a prompt restores what it restores: matched pages, best state, and the first token that differs from a stored prompt."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

from hicache.host_cache import HostCache
from hicache.index import NONE, StateReason
from hicache.miss_history import MissHistory
from hicache.policy import restore_cap
from hicache.replay import WindowReplay

REMEMBERED_PROMPTS = 64
SHOWN_TOKENS = 12  # of both sides, from the first difference on


class Explainer:
    """Remembers the last stored prompts (4 bytes per token) and compares a prompt with them when asked.

    keep_tokens, min_restore_tokens: as in the restore rule.
    """

    def __init__(self, cache: HostCache, replay: WindowReplay, misses: MissHistory, keep_tokens: int, min_restore_tokens: int) -> None:
        self._misses = misses
        self._cache, self._replay, self._keep_tokens, self._min_restore_tokens = cache, replay, keep_tokens, min_restore_tokens
        self._prompts: deque[tuple[str, array[int]]] = deque(maxlen=REMEMBERED_PROMPTS)

    def remember(self, tokens: Sequence[int], salt: str) -> None:
        """A prompt was stored. It replaces an older one that it continues."""
        prompt = array("I", tokens)
        if self._prompts and self._prompts[-1][0] == salt and prompt[: len(self._prompts[-1][1])] == self._prompts[-1][1]:
            self._prompts.pop()
        self._prompts.append((salt, prompt))

    def explain(self, tokens: Sequence[int], keys: Sequence[bytes], salt: str, scoped: bytes | None = None) -> dict[str, Any]:
        """The record of one prompt. `first_difference` is None when no remembered prompt shares a beginning, or none parts from it.

        scoped: see `MissHistory`.
        """
        index, size = self._cache.index, self._cache.page_tokens
        path = index.match(keys)
        state, miss = self._cache.restore_point(path, len(tokens), self._keep_tokens, self._min_restore_tokens)
        restored = index.position[state] if state != NONE else 0
        replay_end = self._replay.end(keys, len(path), len(tokens), restored)
        if replay_end:
            restored, miss = replay_end - self._replay.tokens, None
        if miss is not None:
            miss = self._misses.refine(miss, keys[: restore_cap(len(tokens), self._keep_tokens, size) // size], scoped)
        states = [(index.position[s], StateReason(index.states.reason[s]).name.lower()) for s in index.states.on(path)]
        return {
            "prompt_tokens": len(tokens),
            "matched_pages": len(path),
            "matched_tokens": len(path) * size,
            "states": [{"position": position, "reason": reason} for position, reason in states],
            "priority": index.ranks.priority(path[-1]) if path else None,
            "restore_tokens": restored,
            "replay": {"mode": str(self._replay.mode), "end": replay_end, "tokens": self._replay.tokens} if replay_end else None,
            "miss": miss.value if miss is not None else "",
            "first_difference": self._first_difference(array("I", tokens), salt),
        }

    def _first_difference(self, tokens: array[int], salt: str) -> dict[str, Any] | None:
        candidates = [prompt for owner, prompt in self._prompts if owner == salt]
        nearest = max(candidates, key=lambda prompt: common_length(prompt, tokens), default=None)
        if nearest is None:
            return None
        at = common_length(nearest, tokens)
        if at == 0 or at in (len(tokens), len(nearest)):
            return None
        return {"index": at, "stored": nearest[at : at + SHOWN_TOKENS].tolist(), "asked": tokens[at : at + SHOWN_TOKENS].tolist()}


def common_length(a: array[int], b: array[int]) -> int:
    """Leading items that two arrays share, by bisection over slice comparisons."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
