"""Hashes of a prompt's prefixes: the router remembers these instead of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from hicache.keys import KeySpace, pack_tokens

BLOCK = 128


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Hashes of a token sequence: `chain[i]` covers the first i blocks, `whole` all of it. Long prompts are hashed off the event loop.

    paged: `chain[1:]` are the page keys of the ranks' own prefix caches.
    """

    token_ids: Sequence[int]
    chain: list[bytes]
    whole: bytes
    paged: bool = False


def prompt_keys(token_ids: Sequence[int], salt: str = "", space: KeySpace | None = None) -> PromptKeys:
    """salt: the request's cache salt. Prompts with different salts share nothing on any rank, so they must not attract each other.

    space: the ranks' key space, so that their caches can be asked; pages must be blocks of the same size.
    """
    packed, chain = pack_tokens(token_ids), [salt.encode()]
    if space is not None:
        chain += space.page_keys(packed, salt)
    else:
        for start in range(0, len(packed) - BLOCK + 1, BLOCK):
            chain.append(digest(chain[-1], packed[start : start + BLOCK]))
    rest = packed[len(packed) // BLOCK * BLOCK :]
    return PromptKeys(token_ids, chain, digest(b"whole" + chain[-1], rest), space is not None)


def digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()
