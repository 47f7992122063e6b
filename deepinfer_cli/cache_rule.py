"""What a prompt may take from the prefix cache, worked out by a client: sizes, the cap, and a prediction turn by turn."""

from __future__ import annotations

PAGE = 128  # tokens per page: the engine's block size
KEEP = 140  # last prompt tokens that are always computed. Source: config key `yoco_keep_tokens` of the server
LEAST = PAGE + KEEP  # 268: the shortest prompt with a whole page before the kept tokens


def cap(prompt_tokens: int) -> int:
    """The most that any prompt of this length can take from the cache."""
    return max(0, (prompt_tokens - KEEP) // PAGE * PAGE)


class Predictor:
    """What `cached_tokens` should be: the states and pages that earlier prefills of this conversation left behind.

    cached = the largest stored state not beyond the pages that match and not beyond the cap of a prompt of N tokens,
    which is floor((N - 140) / 128) * 128. A prefill of P tokens stores states at floor((P - 140) / 128) * 128
    and at floor((P - 1) / 128) * 128. An answer may leave one at its last page end (`hicache.store_decode`); it counts only where the
    prompt holds the answer with the ids that were sampled, which the server knows and a client does not.
    """

    def __init__(self) -> None:
        self._resends: set[int] = set()
        self._tails: set[int] = set()
        self._answers: set[int] = set()
        self._pages = 0
        self._warm = False

    def predict(self, prompt_tokens: int, common_tokens: int, got: int) -> int:
        """common_tokens: leading tokens shared with the previous prompt. got: tells whether an earlier run stored this conversation."""
        limit, states = cap(prompt_tokens), self._resends | self._tails
        cold = _deepest(states, self._reachable(prompt_tokens, common_tokens))
        if cold < got <= limit and got in self._answers:
            return got
        if not states and 0 < got == limit:
            self._warm = True  # the fixed seed makes the same conversation again, so another run may have stored it whole
        return limit if self._warm and got > cold else cold

    def without_tails(self, prompt_tokens: int, common_tokens: int) -> int:
        """The same where the states at last page ends were not kept."""
        return _deepest(self._resends, self._reachable(prompt_tokens, common_tokens))

    def _reachable(self, prompt_tokens: int, common_tokens: int) -> int:
        return min(cap(prompt_tokens), self._pages, common_tokens // PAGE * PAGE)

    def store(self, prompt_tokens: int, output_tokens: int = 0) -> None:
        """A prefill and its answer. The last token of an answer is never computed, and may not be counted."""
        self._pages = prompt_tokens // PAGE * PAGE
        self._resends.add(cap(prompt_tokens))
        self._tails.add((prompt_tokens - 1) // PAGE * PAGE)
        if output_tokens:
            self._answers |= {(prompt_tokens + output_tokens - uncounted) // PAGE * PAGE for uncounted in (0, 1)}


def _deepest(states: set[int], limit: int) -> int:
    return max((state for state in states if state <= limit), default=0)
