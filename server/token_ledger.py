"""Which generated token a character of the output came from."""

from __future__ import annotations

from collections import deque


class TokenLedger:
    """Tokens in order, each with the offset of its first character, claimed as the text is consumed.

    A token that ends no character begins where the next character will stand, so that all parts of one character go together.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_claimed = 0
        self._waiting: deque[tuple[int, int, bool]] = deque()

    def add(self, offset: int, is_control: bool) -> None:
        """The next token begins at `offset`. Controls count, but are never handed out."""
        self._waiting.append((offset, self.num_tokens, is_control))
        self.num_tokens += 1

    def claim(self, end: int) -> list[tuple[int, int]]:
        """(offset, index) of the tokens that begin before `end` and were not claimed yet."""
        claimed = []
        while self._waiting and self._waiting[0][0] < end:
            offset, index, is_control = self._waiting.popleft()
            self.num_claimed += 1
            if not is_control:
                claimed.append((offset, index))
        return claimed
