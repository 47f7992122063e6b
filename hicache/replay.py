"""Resuming where pages are stored and no window state is: the windows there are computed again from the tokens before.

Compressed entries of these tokens are in the restored pages already; the replayed tokens read them and leave them as they are. They see
no window key from before the first of them, so what they leave in the windows depends on how many are replayed:

- bounded: one window. The deeper a layer, the less of its window is right: an approximation, as DeepSeek accepts it for V4.1.
- exact: what a layer gets wrong reaches one window further in the layer above, and no further. One window per encoder layer (2,560
  tokens for the released model) leaves exactly what an ordinary prefill would have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from hicache.errors import ConfigError
from hicache.policy import align_up, restore_cap

_LEAST_WINDOWS = 16  # bounded: a smaller gain is not worth its error. 2,048 tokens of the released model.
_MOST_REMEMBERED = 4096


class ReplayMode(StrEnum):
    OFF = "off"
    BOUNDED = "bounded"
    EXACT = "exact"


def check_replay(mode: str, batch_invariant: bool) -> None:
    """Raises: ConfigError when answers must not depend on the cache, and with this mode they would."""
    if batch_invariant and ReplayMode(mode) is ReplayMode.BOUNDED:
        raise ConfigError(
            "hicache.replay is bounded, which approximates, and engine.batch_invariant promises the same bits on a hit and on a miss",
            hint="hicache.replay=exact, or off",
        )


def replayed_tokens(mode: ReplayMode, window: int, num_layers: int, page_tokens: int) -> int:
    """Tokens that are computed again before the point of resumption, in whole pages. num_layers: encoder layers."""
    if mode is ReplayMode.OFF:
        return 0
    # Keys of layer l are right from l * (window - 1) tokens behind the start on, and a window of them is wanted.
    needed = window if mode is ReplayMode.BOUNDED else num_layers * (window - 1) + 1
    return align_up(needed, page_tokens)


class WindowReplay:
    """Where prompts resume by replay. What follows an approximate window is never stored, so a bounded replay happens once at a page
    end: the next prompt that comes there is computed in full, and leaves a state for all others.
    """

    def __init__(self, mode: str, window: int, num_layers: int, page_tokens: int, keep_tokens: int, min_restore_tokens: int) -> None:
        self.mode = ReplayMode(mode)
        self.tokens = replayed_tokens(self.mode, window, num_layers, page_tokens)
        self._page_tokens, self._keep_tokens, self._min_restore_tokens = page_tokens, keep_tokens, min_restore_tokens
        self._least_gap = _LEAST_WINDOWS * window if self.approximate else self.tokens
        self._done: dict[bytes, None] = {}

    @property
    def approximate(self) -> bool:
        return self.mode is ReplayMode.BOUNDED

    def end(self, keys: Sequence[bytes], num_pages: int, num_tokens: int, restored: int) -> int:
        """The page end up to which a prompt of `num_tokens` restores pages without a state; its prefill starts `tokens` before it.

        keys, num_pages: of its stored pages. restored: where a state lets it resume, 0 for nowhere. Returns 0 when that is as good.
        """
        if self.mode is ReplayMode.OFF:
            return 0
        end = min(num_pages * self._page_tokens, restore_cap(num_tokens, self._keep_tokens, self._page_tokens))
        if end - restored <= self._least_gap or end - self.tokens < max(self._min_restore_tokens, 1):
            return 0
        return 0 if keys[end // self._page_tokens - 1] in self._done else end

    def resumed(self, key: bytes) -> None:
        """A prompt was resumed behind the page of that key."""
        if self.approximate:
            while len(self._done) >= _MOST_REMEMBERED:
                self._done.pop(next(iter(self._done)))
            self._done[key] = None
