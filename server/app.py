"""The ASGI application of a front: its routes, and how failures become answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from server import admin
from server.errors import ApiError
from server.front_state import Front
from server.json_response import JsonResponse
from server.middleware import error_headers, wrap
from server.openapi import document
from server.routes import ROUTES, Route
from server.streaming import ClientGone
from server.thinking import ALIASES

NO_SUCH_PATH = "no such path: there are POST /v1/chat/completions, POST /v1/completions and GET /v1/models, among others"


def create_app(front: Front) -> ASGIApp:
    """The complete ASGI application of one front."""
    docs = front.config.docs
    app = FastAPI(
        title="dix",
        redirect_slashes=False,
        docs_url=None,  # its page loads scripts from another host
        redoc_url=None,
        openapi_url="/openapi.json" if docs else None,
    )
    app.openapi = lambda: describe(front)  # type: ignore[method-assign]
    _add_failures(app, front)
    for route in ROUTES:
        if route.enabled(front.config):
            _add(app, route, front)
    if docs:
        app.get("/docs", include_in_schema=False)(lambda: admin.docs(describe(front)))
    return wrap(app, lambda: front.keys, front.metrics.reject, front.config.origins)


def describe(front: Front) -> dict[str, Any]:
    """The OpenAPI document. Raises Unavailable until the engine's vocabulary is known."""
    efforts = [*front.text.encoder.dialect.efforts, *ALIASES, "none"]
    config = front.config
    return document(
        front.launch.served_name,
        front.limits.vocab_size,
        config.max_tokens_limit,
        efforts,
        render=config.render_route,
        faults=config.debug_faults,
    )


def _add_failures(app: FastAPI, front: Front) -> None:
    async def on_api_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        front.metrics.reject(error.status)
        return JsonResponse(error.body(), status_code=error.status, headers=error_headers(error))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code, message = ("not_found", NO_SUCH_PATH) if error.status_code == 404 else (None, str(error.detail))
        answer = await on_api_error(request, ApiError(error.status_code, code, message))
        answer.headers.update(error.headers or {})
        return answer

    async def on_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=204)  # nobody reads it

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, on_gone)


def _add(app: FastAPI, route: Route, front: Front) -> None:
    async def endpoint(request: Request) -> Response:
        return await route.handler(front, request)

    app.add_api_route(route.path, endpoint, methods=[route.method])
