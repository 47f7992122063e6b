"""What every request passes before its route, outermost first: request id, browser origin, API key. Plain ASGI."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.connection import MAX_HEADER_BYTES
from server.errors import ApiError, Unauthorized
from server.pacing import Paced
from server.routes import PACED_PATHS, Access, paths
from server.tenants import key_id

REQUEST_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")
OPEN_PATHS, OPERATOR_PATHS = paths(Access.OPEN), paths(Access.OPERATOR)
LOOPBACK = frozenset({"127.0.0.1", "::1"})
log = logging.getLogger("front")


def wrap(app: ASGIApp, keys: Callable[[], Iterable[bytes]], on_reject: Callable[[int], None], origins: list[str]) -> ASGIApp:
    """The application behind all of this module. Pages of `origins` may call it; their preflight requests carry no key."""
    gated: ASGIApp = Gate(app, keys, on_reject, origins)
    if origins:
        exposed = ["X-Request-ID", "X-DeepInfer-Rank", "Retry-After"]
        gated = CORSMiddleware(gated, origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=exposed)
    return Paced(RequestIds(gated), PACED_PATHS)


class RequestIds:
    """Gives every answer an X-Request-ID, and turns what nobody caught into a 500 with the common body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = choose_request_id(scope)
        scope.setdefault("state", {}).update(request_id=request_id, key_id="", trusted=False)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            log.exception("unhandled", extra={"request_id": request_id})
            if not started:
                await send_error(send_with_id, ApiError(500, "internal_error", "internal error", type="server_error"))


class Gate:
    """Deny by default: with keys configured, every path outside `OPEN_PATHS` needs one, unknown paths and every method included.

    Without keys the peer's address is all there is, and a browser on this machine lends its own to every page: requests of pages that
    are neither ours nor of `origins` are refused.
    """

    def __init__(
        self, app: ASGIApp, keys: Callable[[], Iterable[bytes]], on_reject: Callable[[int], None], origins: Iterable[str] = ()
    ) -> None:
        self.app = app
        self.keys = keys
        self.on_reject = on_reject
        self.origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self.check(scope)
        except ApiError as error:
            self.on_reject(error.status)
            await send_error(send, error)
            return
        await self.app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raises ApiError 401, 403 or 431 before the body is read. Notes whose key it is, and whether the peer may see operators' data."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(431, None, f"the headers are larger than {MAX_HEADER_BYTES} bytes")
        keys = list(self.keys())
        path = scope["path"]
        if not keys:
            self._check_page(scope)
        if path in OPEN_PATHS:
            return
        if not keys:
            scope["state"]["trusted"] = is_local(scope)
            if path in OPERATOR_PATHS and not scope["state"]["trusted"]:
                raise Unauthorized("this route is only open to loop-back peers while no API key is configured")
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            raise Unauthorized("send one Authorization header: Bearer <key>")
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise Unauthorized("send the key as: Authorization: Bearer <key>")
        # Every key is compared, in constant time each: the answer's timing says nothing about which one was close.
        if sum(hmac.compare_digest(key.strip(), known) for known in keys) == 0:
            raise Unauthorized("the API key is not accepted")
        scope["state"].update(key_id=key_id(key.strip()), trusted=True)

    def _check_page(self, scope: Scope) -> None:
        """Raises ApiError 403 for a page of another site, also when its own name was made to lead here (DNS rebinding)."""
        headers = {name: value.decode("latin-1").lower() for name, value in scope["headers"] if name in (b"host", b"origin")}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if "*" in self.origins or origin in self.origins or any(listed.partition("://")[2] == host for listed in self.origins):
            return
        rebound = is_local(scope) and not is_own_name(host)
        if rebound or (origin is not None and origin.partition("://")[2] != host):
            hint = "use an API key, or name the origin with --allow-origin"
            raise ApiError(403, "foreign_origin", f"pages of other sites may not call this server: {hint}", type="permission_error")


def is_local(scope: Scope) -> bool:
    """Whether the peer is a program of this machine: a browser of this machine too, whatever page it shows."""
    client = scope.get("client")
    return client is not None and client[0] in LOOPBACK


def is_own_name(host: str) -> bool:
    """Whether nobody else can make the name of a Host header lead here: an address, localhost, or a name without a dot."""
    name = host.partition(":")[0]
    return host.startswith("[") or "." not in name or name.endswith(".localhost") or name.replace(".", "").isdigit()


def choose_request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if REQUEST_ID.fullmatch(text):
                return str(text)
    return uuid.uuid4().hex


def error_headers(error: ApiError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code == "draining":
        headers["Connection"] = "close"
    return headers


async def send_error(send: Callable[[dict[str, Any]], Any], error: ApiError) -> None:
    body = msgspec.json.encode(error.body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error_headers(error).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
