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
    and at floor((P - 1) / 128) * 128.
    """

    def __init__(self) -> None:
        self._states: set[int] = set()
        self._pages = 0
        self._warm = False

    def predict(self, prompt_tokens: int, common_tokens: int, got: int) -> int:
        """common_tokens: leading tokens shared with the previous prompt. got: tells whether an earlier run stored this conversation."""
        limit = cap(prompt_tokens)
        reachable = min(limit, self._pages, common_tokens // PAGE * PAGE)
        cold = max((s for s in self._states if s <= reachable), default=0)
        if not self._states and 0 < got == limit:
            self._warm = True  # the fixed seed makes the same conversation again, so another run may have stored it whole
        return limit if self._warm and got > cold else cold

    def store(self, prompt_tokens: int) -> None:
        self._pages = prompt_tokens // PAGE * PAGE
        self._states |= {cap(prompt_tokens), (prompt_tokens - 1) // PAGE * PAGE} - {0}
