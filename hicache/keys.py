"""Page keys: a SHA-256 chain over token ids, rooted in everything that decides the stored bytes.

A key is a pure function of the root and the tokens, so equal prefixes meet, and nothing a client sends besides tokens and its
salt can reach a page.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence

SCHEMA = 1  # bumped when the construction below changes


def lp(data: bytes) -> bytes:
    """`data` with its u32 little-endian length in front, so that adjacent fields cannot run into each other."""
    return len(data).to_bytes(4, "little") + data


def pack_tokens(tokens: Sequence[int]) -> array[int]:
    """Token ids as u32 little endian. An array of unsigned integers may come back as it is."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        packed = tokens if sys.byteorder == "little" else tokens[:]
    else:
        packed = array("I")
        packed.fromlist(tokens if isinstance(tokens, list) else list(tokens))  # twice as fast as array's own loop over any iterable
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def hash_chain(root: bytes, tokens: array[int], page_tokens: int, extras: Mapping[int, bytes] | None = None) -> list[bytes]:
    """Keys of all full pages of packed `tokens`: each is SHA-256(key before | tokens | extra). `native_keys` has the compiled twin."""
    data, step, key, sha256 = tokens.tobytes(), 4 * page_tokens, root, hashlib.sha256
    keys: list[bytes] = []
    append = keys.append
    for begin in range(0, len(data) // step * step, step):
        page = key + data[begin : begin + step]
        key = sha256(page + extras.get(begin // step, b"") if extras else page).digest()
        append(key)
    return keys


def derive_salt(secret: bytes, key_id: str, field: str = "") -> str:
    """The cache salt of an API key, made by the server. A client's own `field` is added to it and never replaces it: a salt that a
    client could choose alone would let it probe another tenant's prefixes.
    """
    return hmac.new(secret, lp(key_id.encode()) + lp(field.encode()), hashlib.sha256).hexdigest()


class KeySpace:
    """Roots of one model in one cache format. Keys of different spaces, tenants or epochs never meet.

    fingerprint: digest of config and weights. kv_format: layout of a page and of a state. numerics: bumped by hand when a kernel
    changes stored values. adapter: content digest of an adapter. secret: per-server bytes that make keys unpredictable.
    """

    def __init__(
        self,
        fingerprint: str,
        kv_format: str,
        page_tokens: int,
        *,
        numerics: str = "1",
        adapter: str = "",
        secret: bytes = b"",
    ) -> None:
        assert page_tokens > 0, f"page_tokens is {page_tokens}"
        self.page_tokens = page_tokens
        self.epoch = 0
        self.chain: Callable[[bytes, array[int], int], list[bytes]] | None = None  # the compiled twin of `hash_chain`, if there is one
        self._base = hashlib.sha256(
            b"hicache\0"
            + SCHEMA.to_bytes(4, "little")
            + lp(fingerprint.encode())
            + lp(kv_format.encode())
            + page_tokens.to_bytes(4, "little")
            + lp(numerics.encode())
            + lp(adapter.encode())
            + lp(secret)
        ).digest()
        self._root = self._make_root()

    @property
    def proof(self) -> bytes:
        """Shows that two processes make the same keys, without telling how."""
        return hashlib.sha256(b"hicache segment\0" + self._base).digest()

    def resume(self, epoch: int) -> None:
        """Go on where a former process with the same base was."""
        self.epoch = epoch
        self._root = self._make_root()

    def _make_root(self) -> bytes:
        return hashlib.sha256(self._base + self.epoch.to_bytes(8, "little")).digest()

    def reset(self) -> None:
        """Forget everything in O(1): keys made from now on match no earlier one."""
        self.epoch += 1
        self._root = self._make_root()

    def tenant_root(self, salt: str) -> bytes:
        """The chain's start for one tenant. An empty salt is the public tenant."""
        return hashlib.sha256(self._root + lp(salt.encode())).digest()

    def page_keys(self, tokens: Sequence[int], salt: str = "", extras: Mapping[int, bytes] | None = None) -> list[bytes]:
        """32-byte keys of all full pages of `tokens`, in order.

        extras: page index -> bytes that also decide the page (image digests); every page that an image overlaps needs them.
        """
        root, packed = self.tenant_root(salt), pack_tokens(tokens)
        if extras or self.chain is None:
            return hash_chain(root, packed, self.page_tokens, extras)
        return self.chain(root, packed, self.page_tokens)

    def first_key(self, tokens: Sequence[int], salt: str = "") -> bytes | None:
        """Key of the first page; None when there is no full one."""
        return next(iter(self.page_keys(tokens[: self.page_tokens], salt)), None)

    def extend(self, keys: list[bytes], tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """`keys` of the leading pages of `tokens`, followed by those of all other full pages."""
        if not keys:
            return self.page_keys(tokens, salt)
        packed = pack_tokens(tokens[len(keys) * self.page_tokens :])
        return keys + (self.chain or hash_chain)(keys[-1], packed, self.page_tokens)
