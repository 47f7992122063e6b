"""Bursts of requests, spread over iterations of the event loop so that running streams are served in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

PER_TURN = 2  # beginning a request takes up to about two milliseconds


class Turns:
    """First come, first served; at most `per_turn` callers pass in one iteration of the loop."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._armed = False

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._armed:
            self._armed = True
            loop.call_soon(self._next, loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """A new iteration begins: let the first of those who wait pass."""
        self._left = self._per_turn
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # the client may have left meanwhile
                turn.set_result(None)
                self._left -= 1
        self._armed = bool(self._waiting)
        if self._armed:
            loop.call_soon(self._next, loop)


class Paced:
    """Requests for `paths` take turns before anything is done for them; all others pass at once."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self.app = app
        self.paths = paths
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") in self.paths:
            await self.turns.take()
        await self.app(scope, receive, send)
