"""Messages between the front and the ranks: msgpack over a Unix socket, one tagged struct per message.

A rank's address carries its incarnation, so a message of a rank that was replaced is recognised and dropped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.request import Output, Request


class AddRequest(msgspec.Struct, tag="add", frozen=True):
    """`explain`: number of an operation whose answer says what the request finds in the prefix cache; 0 asks for none."""

    request: Request
    explain: int = 0


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_ids: list[str]


class Wake(msgspec.Struct, tag="wake", frozen=True):
    """Another rank got work: join its step now instead of sleeping out the idle wait."""


class ResetCache(msgspec.Struct, tag="reset_cache", frozen=True):
    operation: int


class ExplainPrompt(msgspec.Struct, tag="explain", frozen=True):
    """What would this prompt restore from the prefix cache? scope: see `Request.cache_scope`."""

    operation: int
    token_ids: list[int]
    salt: str
    scope: str = ""


class KeepPrefix(msgspec.Struct, tag="keep", frozen=True):
    """Pin what the prefix cache holds of this prompt. ttl_s: 0 lets go of it, infinity keeps it to the end."""

    operation: int
    token_ids: list[int]
    salt: str
    ttl_s: float


class SetScheduling(msgspec.Struct, tag="set_scheduling", frozen=True):
    operation: int
    prefill_attempt_interval: int | None
    prefill_any_interval: int | None


class Fault(msgspec.Struct, tag="fault", frozen=True):
    """Break something on purpose. `exit`, `raise` and `hang` are the rank's own; other kinds go to the engine."""

    operation: int
    kind: str
    arguments: dict[str, Any] = {}


class RankLimits(msgspec.Struct, frozen=True):
    """What the front must know of an engine. Tokens, sequences and blocks. fingerprint, kv_format: of the page keys of its cache."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_id: int
    keep_tokens: int
    num_blocks: int
    block_size: int
    precision: str = ""
    device: str = ""
    fingerprint: str = ""
    kv_format: str = ""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    pid: int
    limits: RankLimits


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """Everything that one step produced."""

    outputs: list[Output]


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The engine did not take a request."""

    request_id: str
    message: str


class Stats(msgspec.Struct, tag="stats", frozen=True):
    record: dict[str, Any]


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """Answer to an operation; `error` is empty on success."""

    operation: int
    result: dict[str, Any]
    error: str = ""


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The rank ends now."""

    message: str
    hint: str = ""
    exit_code: int = 4


ToRank = AddRequest | Abort | Wake | ResetCache | ExplainPrompt | KeepPrefix | SetScheduling | Fault
FromRank = Ready | Outputs | Refused | Stats | Reply | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    return _from_rank.decode(data)


def rank_address(rank: int, incarnation: int) -> bytes:
    return f"{rank}:{incarnation}".encode()


def parse_address(address: bytes) -> tuple[int, int]:
    """(rank, incarnation) of a rank's address."""
    rank, _, incarnation = address.decode().partition(":")
    return int(rank), int(incarnation)
