"""The exact token ids that were sampled, for text that comes back as history.

A model may split a text into other tokens than the tokenizer does. A prompt that encodes such an answer anew would part from the cached
one at the first of them. So the ids of every stretch between two control tokens that the tokenizer would split differently are kept,
found by a digest of the tenant's salt and the text, and put in when a prompt holds that very stretch. The text that the model reads
stays the same to the byte.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

from engine.tokenizer import Tokenizer

BYTES_OF_STRETCH = 400  # of key, array and place in the map
BYTES_OF_ID = 4
Known = Callable[[str], Sequence[int] | None]


class SampledIds:
    """One per front; safe to use from several threads. The least recently used stretches go first, once `most_bytes` are kept."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_ids = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """About what all of it takes."""
        return BYTES_OF_STRETCH * len(self._kept) + BYTES_OF_ID * self._num_ids

    def learn(self, tokenizer: Tokenizer, salt: str, token_ids: Sequence[int]) -> int:
        """Keep what the tokenizer would split differently of an answer. Returns the number of such stretches."""
        learned = 0
        for stretch in _stretches(tokenizer, token_ids):
            try:
                text = b"".join(map(tokenizer.token_bytes, stretch)).decode("utf-8")
            except UnicodeDecodeError:
                continue  # an answer that ends within a character has no text that could come back
            if tokenizer.encode_plain(text) != stretch:
                self._keep(_digest(salt, text), array("I", stretch))
                learned += 1
        return learned

    def view(self, salt: str) -> Known:
        """What a tenant's prompts may use: text -> sampled ids, or None."""

        def known(text: str) -> Sequence[int] | None:
            if not self._kept:
                return None
            key = _digest(salt, text)
            with self._lock:
                found = self._kept.get(key)
                if found is not None:
                    self._kept.move_to_end(key)
            return found

        return known

    def _keep(self, key: bytes, ids: array[int]) -> None:
        if BYTES_OF_STRETCH + BYTES_OF_ID * len(ids) > self._most_bytes:
            return
        with self._lock:
            self._num_ids += len(ids) - len(self._kept.pop(key, ()))
            self._kept[key] = ids
            while self.num_bytes > self._most_bytes:
                self._num_ids -= len(self._kept.popitem(last=False)[1])


def _stretches(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Iterator[list[int]]:
    """Runs of ordinary ids between control ids."""
    controls = frozenset(tokenizer.added.values())
    run: list[int] = []
    for token_id in token_ids:
        if token_id not in controls:
            run.append(token_id)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _digest(salt: str, text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), key=blake2b(salt.encode(), digest_size=32).digest(), digest_size=32).digest()
