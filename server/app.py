"""The routes, and how failures become answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from server import admin, chat, completions
from server.errors import ApiError
from server.front_state import Front
from server.json_response import JsonResponse
from server.middleware import error_headers, wrap
from server.openapi import document
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
    _add_open_routes(app, front)
    _add_generation(app, front)
    _add_admin(app, front)
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


def _add_open_routes(app: FastAPI, front: Front) -> None:
    @app.get("/")
    async def page() -> Response:
        return admin.page()

    @app.get("/health/live")
    async def live() -> Response:
        return admin.live()

    @app.get("/health/ready")
    async def ready() -> Response:
        return admin.health(front, strict=True)

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        return admin.health(front, strict=False)

    @app.get("/version")
    async def version() -> Response:
        return admin.version()

    @app.get("/metrics")
    async def prometheus() -> Response:
        return admin.prometheus(front)

    @app.get("/deepinfer/metrics")
    async def metrics() -> Response:
        return admin.metrics(front)


def _add_generation(app: FastAPI, front: Front) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await chat.create(front, request)

    @app.post("/v1/completions")
    async def plain_completions(request: Request) -> Response:
        return await completions.create(front, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return admin.models(front)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return admin.model(front, name)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await admin.tokenize(front, request)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await admin.detokenize(front, request)


def _add_admin(app: FastAPI, front: Front) -> None:
    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        return await admin.reset_prefix_cache(front)

    @app.post("/hicache/pin")
    async def pin_prefix(request: Request) -> Response:
        return await admin.pin_prefix(front, request)

    @app.post("/deepinfer/cache/explain")
    async def explain_cache(request: Request) -> Response:
        return await admin.explain_cache(front, request)

    @app.get("/deepinfer/scheduling")
    async def scheduling() -> Response:
        return JsonResponse(admin.scheduling(front))

    @app.post("/deepinfer/scheduling")
    async def set_scheduling(request: Request) -> Response:
        return await admin.set_scheduling(front, request)

    if front.config.debug_faults:

        @app.post("/deepinfer/debug/fault")
        async def debug_fault(request: Request) -> Response:
            return await admin.debug_fault(front, request)

    if front.config.render_route:

        @app.post("/deepinfer/render")
        async def render(request: Request) -> Response:
            return await admin.render(front, request)
