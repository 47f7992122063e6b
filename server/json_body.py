"""Reading a request body: limits on size, time and memory, strict JSON, nothing that blocks the event loop."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError, BadRequest
from server.workers import Workers

IDLE_TIMEOUT_S = 60.0
LEAST_BYTES_PER_S = 16 * 1024  # behind the first `IDLE_TIMEOUT_S`: a body that dribbles in holds memory for nothing
MAX_DEPTH = 64
MAX_VALUES = 2 * 2**20  # a prompt of a million token ids fits twice; values take up to thirty times their bytes
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'",[{')  # all but what separates values, and the ends of strings
BODIES_IN_MEMORY = 8  # of the largest size, all connections together
SMALL_BYTES = 4 * 1024  # rendering and tokenising this much takes about a millisecond
INLINE_BYTES = 64 * 1024  # decoding up to this size takes well under a millisecond; larger bodies go to a worker


@dataclass(slots=True)
class Bodies:
    """Reads the bodies of one front. `num_bytes`: of bodies that are being read or decoded now, without the small ones."""

    max_bytes: int
    workers: Workers
    num_bytes: int = 0

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The body as a JSON object. Notes in `request.state.small_body` whether work on its text may run on the event loop.

        Raises:
            ApiError: 413 too large (also for chunked bodies, while reading), 408 too slow, 415 other content type, 429 too many at once.
            BadRequest: not a JSON object.
        """
        check_content_type(request)
        share = Share(self)
        try:
            data = await read_bytes(request, self.max_bytes, share)
            request.state.small_body = len(data) <= SMALL_BYTES
            value = decode(data) if len(data) <= INLINE_BYTES else await self.workers.run(decode, data)
        finally:
            share.give_back()
        if not isinstance(value, dict):
            raise BadRequest(None, "the body must be a JSON object", "invalid_json")
        return value


@dataclass(slots=True)
class Share:
    """One body's part of the memory for bodies. Small bodies need none: large ones that stall cannot lock them out."""

    bodies: Bodies
    num_bytes: int = 0

    def grow(self, num_bytes: int) -> None:
        """Raises ApiError 429 when all bodies together would take too much."""
        if num_bytes <= INLINE_BYTES:
            return
        more = num_bytes - self.num_bytes
        if self.bodies.num_bytes + more > BODIES_IN_MEMORY * self.bodies.max_bytes:
            text = "too many large bodies are being read"
            raise ApiError(429, "queue_full", text, type="rate_limit_error", retry_after_s=1)
        self.bodies.num_bytes += more
        self.num_bytes = num_bytes

    def give_back(self) -> None:
        self.bodies.num_bytes -= self.num_bytes
        self.num_bytes = 0


def check_content_type(request: Request) -> None:
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, None, "send the body as application/json")


async def read_bytes(request: Request, max_bytes: int, share: Share) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large(max_bytes)
    chunks: list[bytes] = []
    size, started_s = 0, time.monotonic()
    stream = request.stream().__aiter__()
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream), IDLE_TIMEOUT_S)
        except StopAsyncIteration:
            return b"".join(chunks)
        except TimeoutError:
            raise too_slow(f"no part of the body arrived for {IDLE_TIMEOUT_S:.0f} s") from None
        except ClientDisconnect:
            raise ApiError(499, None, "the client went away") from None
        size += len(chunk)
        if size > max_bytes:
            raise too_large(max_bytes)
        if time.monotonic() - started_s > IDLE_TIMEOUT_S + size / LEAST_BYTES_PER_S:
            raise too_slow(f"the body arrived with less than {LEAST_BYTES_PER_S} bytes per second")
        share.grow(size)
        chunks.append(chunk)


def too_slow(text: str) -> ApiError:
    return ApiError(408, "body_timeout", text, type="timeout_error")


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {max_bytes} bytes")


def decode(data: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or infinities, no lone surrogates, no absurd numbers, at most 64 levels and `MAX_VALUES` values.

    Raises:
        BadRequest: with code invalid_json.
    """
    if num_values(data) > MAX_VALUES:
        raise BadRequest(None, f"the body holds more than {MAX_VALUES} JSON values", "invalid_json")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise BadRequest(None, f"the body is not valid JSON: {what}", "invalid_json") from None
    _check_nesting(value)
    return value


def num_values(data: bytes) -> int:
    """At least the number of values in a JSON text, and exactly that of commas and brackets outside its strings when they are many."""
    bound = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if bound <= MAX_VALUES:
        return bound
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    if _refuses_by_quotes(marks):
        return bound
    return sum(len(outside) for outside in marks.split(b'"')[::2])


def _refuses_by_quotes(marks: bytes) -> bool:
    """Whether the strings alone, keys or values each, are too many."""
    return marks.count(b'"') > 2 * MAX_VALUES


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise BadRequest(None, f"the body is nested deeper than {MAX_DEPTH} levels", "invalid_json")


def _children(item: Any) -> list[Any]:
    if isinstance(item, float) and not math.isfinite(item):
        raise BadRequest(None, "the body holds a number out of range", "invalid_json")
    if isinstance(item, dict):
        return list(item.values())
    return item if isinstance(item, list) else []
