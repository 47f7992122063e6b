"""Hostile connections against the server's own protocol class in this process: slow, endless, pipelined, upgraded, never reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import pytest
import uvicorn
import uvloop

from server.connection import Connection
from server.streaming import EventStream, until_disconnect

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
LONG_S = 20.0


@dataclass
class Site:
    """A small application behind the connection class. ended: how its long requests ended. bodies: what it read."""

    port: int = 0
    ended: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    server: uvicorn.Server | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        match scope["path"]:
            case "/echo":
                await self._echo(receive, send)
            case "/long":
                await self._long(receive)
            case "/stream":
                await EventStream(self._events(), lambda: self.ended.append("closed"), {})(scope, receive, send)
            case _:
                await answer(send, b"well")

    async def _echo(self, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        await answer(send, body)

    async def _long(self, receive: Any) -> None:
        try:
            await until_disconnect(receive, asyncio.sleep(LONG_S))
        except Exception as error:
            self.ended.append(type(error).__name__)

    async def _events(self) -> AsyncIterator[bytes]:
        for _ in range(10_000):
            yield b"data: " + b"x" * 4000 + b"\n\n"

    @property
    def open_connections(self) -> int:
        assert self.server is not None
        return len(self.server.server_state.connections)


async def answer(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[Site]:
    site = Site()
    protocol = type("Short", (Connection,), {"header_timeout_s": 0.4, "write_timeout_s": 0.4, "linger_s": 0.4, **limits})
    config = uvicorn.Config(site, port=0, http=protocol, ws="none", lifespan="off", log_config=None, timeout_keep_alive=0.4)  # type: ignore[arg-type]
    site.server = server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    site.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.should_exit = server.force_exit = True
        await task


async def exchange(port: int, *parts: bytes, patience_s: float = 5.0) -> bytes:
    """Everything that comes back until the server closes or is silent for `patience_s`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.02)
    received = await read_all(reader, patience_s)
    writer.close()
    return received


async def read_all(reader: asyncio.StreamReader, patience_s: float) -> bytes:
    received = b""
    while True:
        try:
            piece = await asyncio.wait_for(reader.read(65536), patience_s)
        except (TimeoutError, ConnectionResetError):
            return received + b"<open>" if reader.exception() is None and not reader.at_eof() else received
        if not piece:
            return received
        received += piece


async def until(check: Any, patience_s: float = 8.0) -> None:
    async with asyncio.timeout(patience_s):
        while not check():
            await asyncio.sleep(0.02)


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the kind of loop that the front has: transports differ in how they close."""

    @wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        uvloop.run(test(*arguments, **options))

    return run


@pytest.mark.parametrize(
    "offer",
    [
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
    ],
)
@pytest.mark.parametrize("chunked", [True, False])
@on_uvloop
async def test_an_offer_to_upgrade_does_not_cost_the_body(offer: bytes, chunked: bool) -> None:
    body = b"5\r\nhello\r\n0\r\n\r\n" if chunked else b"hello"
    length = b"transfer-encoding: chunked" if chunked else b"content-length: 5"
    async with serving() as site:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\n" + offer + length + b"\r\n\r\n"
        whole = await exchange(site.port, head + body + HEALTH)
        late = await exchange(site.port, head[:30], head[30:] + body[:2], body[2:])
        assert site.bodies == [b"hello", b"hello"]
        assert whole.count(b"HTTP/1.1 200") == 2
        assert b"101" not in whole + late


@on_uvloop
async def test_connect_is_refused_once() -> None:
    async with serving() as site:
        assert (await exchange(site.port, b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n")).count(b"HTTP/1.1 400") == 1


@pytest.mark.parametrize("behind", [b"", HEALTH, HEALTH * 50, b"GET /hea"])
@on_uvloop
async def test_a_client_that_leaves_is_noticed_whatever_it_pipelined(behind: bytes) -> None:
    async with serving(header_timeout_s=30.0) as site:
        _, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n" + behind)
        await asyncio.sleep(0.1)
        assert site.ended == []
        writer.close()
        await until(lambda: site.ended == ["ClientGone"])


@on_uvloop
async def test_what_is_not_http_behind_a_request_gets_no_answer_of_its_own() -> None:
    """Its error would be taken for the answer to the request before it."""
    async with serving() as site:
        assert await exchange(site.port, b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n", b"\x00\x01 garbage\r\n\r\n") == b""
        await until(lambda: site.ended == ["ClientGone"])


@pytest.mark.parametrize("path", [b"/stream", b"/health"])
@on_uvloop
async def test_a_client_that_never_reads_is_cut_off(path: bytes) -> None:
    async with serving() as site:
        writers = []
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1024)
            writer.transport.pause_reading()
            writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            writers.append(writer)
        await asyncio.sleep(0.1)
        await until(lambda: site.open_connections == 0)
        if path == b"/stream":
            await until(lambda: site.ended == ["closed"] * 20)
        for writer in writers:
            writer.close()


@on_uvloop
async def test_a_client_that_reads_slowly_but_reads_gets_everything() -> None:
    async with serving() as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=2**16)
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = 0
        while piece := await reader.read(2**20):
            received += len(piece)
            await asyncio.sleep(0.001)
        assert received > 10_000 * 4000
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [b"G"],
        [b"\r\n\r\n"],
        [HEALTH, b"\r\n"],
        [HEALTH, b"\r\n\r\n", b"GET"],
        [b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n", b"hello"],
        [b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n", b"hello"],
        [b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"7FFFFFFFFFFFFFFF\r\n", b"a"],
    ],
)
@on_uvloop
async def test_no_connection_without_a_running_request_lasts_for_ever(sent: list[bytes]) -> None:
    async with serving() as site:
        received = await exchange(site.port, *sent)
        assert not received.endswith(b"<open>")
        await until(lambda: site.open_connections == 0)


@on_uvloop
async def test_a_body_that_goes_on_behind_its_refusal_is_cut_off_and_the_refusal_seen() -> None:
    async with serving() as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(b"POST /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")

        async def pour() -> None:
            while True:
                writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)

        pouring = asyncio.create_task(pour())
        assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(4096), 5)
        await until(lambda: site.open_connections == 0)
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)
        writer.close()


@on_uvloop
async def test_a_body_that_ends_in_time_leaves_the_connection_usable() -> None:
    async with serving() as site:
        head = b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"
        received = await exchange(site.port, head, b"he", b"llo", HEALTH)
        assert received.count(b"HTTP/1.1 200") == 2


@on_uvloop
async def test_two_thousand_idle_connections_go_and_others_are_served_meanwhile() -> None:
    async with serving(header_timeout_s=1.0) as site:
        idle = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(2000)]
        assert b"well" in await exchange(site.port, HEALTH, patience_s=0.5)
        await until(lambda: site.open_connections == 0)
        refusals = [await reader.read(4096) for reader, _ in idle[:5]]
        assert all(json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == "header_timeout" for refusal in refusals)
        for _, writer in idle:
            writer.close()
