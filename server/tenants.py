"""Which requests may hit each other's prefixes: the salt that the prefix cache gets with every request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hicache.keys import derive_salt


@dataclass(frozen=True, slots=True)
class Tenants:
    """mode: setting `hicache.isolation`. secret: the server's cache secret; without it nobody can compute another tenant's salt."""

    mode: str = "none"
    secret: bytes = b""

    def salt(self, key_id: str, field: str) -> str:
        """Of a request that was sent with API key `key_id` ("" without keys) and the body's `cache_salt`."""
        if self.mode == "none":
            return ""
        return derive_salt(self.secret, key_id, field if self.mode == "field" else "")

    def scope(self, key_id: str) -> str:
        """What the requests of one API key have in common although their `cache_salt` differs; "" where they can have none."""
        return derive_salt(self.secret, key_id) if self.mode == "field" else ""


def key_id(key: bytes) -> str:
    """A name for an API key that does not show it."""
    return hashlib.sha256(b"dix api key\0" + key).hexdigest()
