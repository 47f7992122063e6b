"""Every route of the server: method, path, handler, and who may call it. The one list that application and key check are built from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto

from starlette.requests import Request
from starlette.responses import Response

from server import admin, chat, completions
from server.config import ServerConfig
from server.front_state import Front

Handler = Callable[[Front, Request], Awaitable[Response]]


class Access(Enum):
    """Who may call a route. OPEN: everybody. KEYED: holders of a key, or everybody while no keys are configured.

    OPERATOR: holders of a key, or programs of this machine while no keys are configured.
    """

    OPEN = auto()
    KEYED = auto()
    OPERATOR = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """enabled: whether a server offers it. paced: it begins work, so bursts of it are spread (`server/pacing.py`)."""

    method: str
    path: str
    handler: Handler
    access: Access = Access.KEYED
    enabled: Callable[[ServerConfig], bool] = lambda _config: True
    paced: bool = False


ROUTES = (
    Route("GET", "/", admin.page, Access.OPEN),
    Route("GET", "/health", admin.health, Access.OPEN),
    Route("GET", "/ping", admin.health, Access.OPEN),
    Route("GET", "/health/live", admin.live, Access.OPEN),
    Route("GET", "/health/ready", admin.ready, Access.OPEN),
    Route("GET", "/version", admin.version, Access.OPEN),
    Route("GET", "/metrics", admin.prometheus, Access.OPEN),
    Route("GET", "/deepinfer/metrics", admin.metrics, Access.OPEN),
    Route("POST", "/v1/chat/completions", chat.create, paced=True),
    Route("POST", "/v1/completions", completions.create, paced=True),
    Route("GET", "/v1/models", admin.models),
    Route("GET", "/v1/models/{name:path}", admin.model),
    Route("POST", "/tokenize", admin.tokenize),
    Route("POST", "/detokenize", admin.detokenize),
    Route("POST", "/reset_prefix_cache", admin.reset_prefix_cache, Access.OPERATOR),
    Route("POST", "/hicache/pin", admin.pin_prefix, Access.OPERATOR),
    Route("POST", "/deepinfer/cache/explain", admin.explain_cache, Access.OPERATOR),
    Route("GET", "/deepinfer/scheduling", admin.scheduling, Access.OPERATOR),
    Route("POST", "/deepinfer/scheduling", admin.set_scheduling, Access.OPERATOR),
    Route("POST", "/deepinfer/debug/fault", admin.debug_fault, Access.OPERATOR, enabled=lambda config: config.debug_faults),
    Route("POST", "/deepinfer/render", admin.render, enabled=lambda config: config.render_route),
)


def paths(access: Access) -> frozenset[str]:
    return frozenset(route.path for route in ROUTES if route.access is access)


PACED_PATHS = frozenset(route.path for route in ROUTES if route.paced)
