"""Reading a request body: size and time limits, strict JSON, nothing that blocks the event loop."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError, BadRequest
from server.workers import Workers

IDLE_TIMEOUT_S = 60.0
MAX_DEPTH = 64
SMALL_BYTES = 4 * 1024  # rendering and tokenising this much takes about a millisecond
INLINE_BYTES = 64 * 1024  # decoding up to this size takes well under a millisecond; larger bodies go to a worker


async def read_object(request: Request, max_bytes: int, workers: Workers) -> dict[str, Any]:
    """The body as a JSON object. Notes in `request.state.small_body` whether work on its text may run on the event loop.

    Raises:
        ApiError: 413 too large (also for chunked bodies, while reading), 408 too slow, 415 other content type.
        BadRequest: not a JSON object.
    """
    check_content_type(request)
    data = await read_bytes(request, max_bytes)
    request.state.small_body = len(data) <= SMALL_BYTES
    value = decode(data) if len(data) <= INLINE_BYTES else await workers.run(decode, data)
    if not isinstance(value, dict):
        raise BadRequest(None, "the body must be a JSON object", "invalid_json")
    return value


def check_content_type(request: Request) -> None:
    declared = request.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, None, "send the body as application/json")


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    stream = request.stream().__aiter__()
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream), IDLE_TIMEOUT_S)
        except StopAsyncIteration:
            return b"".join(chunks)
        except TimeoutError:
            raise ApiError(408, "body_timeout", f"no part of the body arrived for {IDLE_TIMEOUT_S:.0f} s", type="timeout_error") from None
        except ClientDisconnect:
            raise ApiError(499, None, "the client went away") from None
        size += len(chunk)
        if size > max_bytes:
            raise too_large(max_bytes)
        chunks.append(chunk)


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {max_bytes} bytes")


def decode(data: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or infinities, no lone surrogates, no absurd numbers, at most 64 levels.

    Raises:
        BadRequest: with code invalid_json.
    """
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise BadRequest(None, f"the body is not valid JSON: {what}", "invalid_json") from None
    _check_nesting(value)
    return value


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
