"""Server-sent events, and noticing that a client went away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError

T = TypeVar("T")
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def event(value: dict[str, Any]) -> bytes:
    """One data event. The encoder writes no raw newlines."""
    return b"data: " + _encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """A failure after the status line. The event line is what makes clients see it as one."""
    return b"event: error\ndata: " + _encode(error.body()) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it when the client goes away. Watches the receive side, so it works while nothing is written.

    Raises:
        ClientGone: the client went away first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streaming answer that ends when its events end or its client leaves; `on_close` runs in either case, and exactly once."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(status_code=200, headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientGone, OSError):
            pass  # nobody is left to tell; `on_close` aborts the work
        finally:
            self._on_close()

    async def _send_all(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
