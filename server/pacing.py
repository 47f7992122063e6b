"""Spreads bursts of requests over iterations of the event loop, so that running streams are served in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

PER_ITERATION = 2  # beginning a request takes up to about two milliseconds


class Pacer:
    """First come, first served; at most `per_iteration` callers pass in one iteration of the loop."""

    def __init__(self, per_iteration: int = PER_ITERATION) -> None:
        self._per_iteration = per_iteration
        self._left = per_iteration
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._armed = False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._armed:
            self._armed = True
            loop.call_soon(self._next, loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        passed = loop.create_future()
        self._waiting.append(passed)
        await passed

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """A new iteration begins: let the first of those who wait pass."""
        self._left = self._per_iteration
        while self._waiting and self._left:
            passed = self._waiting.popleft()
            if not passed.done():  # the client may have left meanwhile
                passed.set_result(None)
                self._left -= 1
        self._armed = bool(self._waiting)
        if self._armed:
            loop.call_soon(self._next, loop)


class Paced:
    """Requests for `paths` wait for the pacer before anything is done for them; all others pass at once."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self.app = app
        self.paths = paths
        self._pacer = Pacer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") in self.paths:
            await self._pacer.wait()
        await self.app(scope, receive, send)
