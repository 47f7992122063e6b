"""One client connection: limits on time and size while the headers arrive, and the common error body for what is not HTTP."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.errors import ApiError

MAX_HEADER_BYTES = 32 * 1024
LINE_BYTES = 4  # colon, blank and line end of a header


class Connection(HttpToolsProtocol):
    """Refuses headers that are too large (431) or take longer than `header_timeout_s` (408), before any of our routes runs."""

    header_timeout_s = 30.0

    _header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_arrived()
        super().connection_lost(exc)

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
        self._headers_arrived()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """The base class calls this for anything that its parser, or a callback of ours, does not accept."""
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(ApiError(431, None, f"the headers are larger than {MAX_HEADER_BYTES} bytes"))
        else:
            self._refuse(ApiError(400, "invalid_http", "this is not a valid HTTP/1.1 request"))

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("headers too large")

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _headers_arrived(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        text = f"the headers did not arrive within {self.header_timeout_s:g} s"
        self._refuse(ApiError(408, "header_timeout", text, type="timeout_error"))

    def _refuse(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        headers: dict[str, Any] = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
        headers["x-request-id"] = uuid.uuid4().hex
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
        self.transport.close()
