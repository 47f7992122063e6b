"""One client connection: limits on what it sends and leaves unread, and proper errors for what is not HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError

MAX_HEADER_BYTES = 32 * 1024
LINE_BYTES = 4  # colon, blank and line end of a header
_OFFERS = (b"upgrade", b"http2-settings")  # headers of a client that would rather speak another protocol


class Connection(HttpToolsProtocol):
    """Refuses headers that are too large (431) or take longer than `header_timeout_s` (408), before any of our routes runs.

    A client that leaves what it is sent unread for `write_timeout_s` is cut off. One that goes on sending a body behind its answer
    has `linger_s`, so that it can see the answer. An offer to speak another protocol is passed over.
    """

    header_timeout_s = 30.0
    write_timeout_s = 30.0
    linger_s = 30.0

    _header_bytes = 0
    _running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
        if self._running is not None and self._answering:
            # The base class tells the newest request only, which may wait behind the one that runs.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._pass_over_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        waits = self.timeout_keep_alive_task is not None or not self._timers.keys().isdisjoint(("headers", "body"))
        if not (waits or self._answering or self.transport.is_closing()):
            # What came began no request: blank lines, or the end of a body that nobody waited for.
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._await_headers()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + LINE_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer("headers")
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer("body")
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.cycle.more_body = False

    def on_response_complete(self) -> None:
        answered = self._running
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()
        elif answered is self.cycle and self.cycle.more_body:
            self._start_timer("body", self.linger_s, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_timer("reader")

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def send_400_response(self, msg: str) -> None:
        """For anything that the parser, or a callback of ours, does not accept."""
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(ApiError(431, None, f"the headers are larger than {MAX_HEADER_BYTES} bytes"))
        else:
            self._refuse(ApiError(400, "invalid_http", "this is not a valid HTTP/1.1 request"))

    @property
    def _answering(self) -> bool:
        """Whether a request waits for the end of its answer."""
        return self._running is not None and not self._running.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _pass_over_upgrade(self, rest: bytes) -> None:
        """Read the request again without its offer: behind one the parser takes nothing for a body (RFC 9110, 7.8, allows to ignore it)."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # no offer but the request itself
            self.send_400_response("")
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(token for token in value.split(b",") if token.strip().lower() not in _OFFERS)
            if name not in _OFFERS:
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("headers too large")

    def _await_headers(self) -> None:
        self._start_timer("headers", self.header_timeout_s, self._too_slow)

    def _await_reader(self) -> None:
        self._start_timer("reader", self.write_timeout_s, self.transport.abort)

    def _start_timer(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        """A timer that runs already goes on."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(delay_s, callback)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _close(self) -> None:
        """Close when everything is written. Closing alone would wait for ever for a client that reads nothing."""
        self.transport.close()
        self._await_reader()

    def _too_slow(self) -> None:
        text = f"the headers did not arrive within {self.header_timeout_s:g} s"
        self._refuse(ApiError(408, "header_timeout", text, type="timeout_error"))

    def _refuse(self, error: ApiError) -> None:
        running = self._running
        if running is not None and self._answering:
            if running is not self.cycle or running.response_started or not running.more_body:
                self.transport.abort()  # an error here would be taken for the answer, or for a part of it, to the request before
                return
            running.disconnected = True  # what is wrong is its own body, so this is its answer
            running.message_event.set()
        body = msgspec.json.encode(error.body())
        headers: dict[str, Any] = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
        headers["x-request-id"] = uuid.uuid4().hex
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
        self._close()
