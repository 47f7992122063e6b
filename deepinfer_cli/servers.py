"""Which server a command means, and how to reach it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from deepinfer_cli.api import Api
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.settings import suggest
from hicache.errors import ConfigError
from server.errors import ServerUnreachable
from server.state import ServerState, list_servers

DEFAULT_PORT = 8888


def find_server(call: Invocation, name: str | None) -> ServerState:
    """The server of that name; without a name the only one. Raises: ServerUnreachable, ConfigError when several run."""
    running = list_servers(call.paths.state)
    if name is None:
        if len(running) == 1:
            return running[0]
        if not running:
            raise ServerUnreachable("no server is running", hint="dix start starts one")
        raise ConfigError(f"{len(running)} servers are running", hint=f"name one of: {', '.join(s.name for s in running)}")
    for state in running:
        if state.name == name:
            return state
    raise ServerUnreachable(f"no server named {name!r} is running", hint=suggest(name, [s.name for s in running], "dix status"))


def find_url(call: Invocation, port: int | None, url: str | None) -> str:
    """`--url`, else `--port` on this machine, else the one running server, else port 8888.

    Raises: ConfigError for what cannot be an address, and when several servers run and none is named.
    """
    if url:
        return checked_url(url if "://" in url else f"http://{url}")
    running = list_servers(call.paths.state)
    if port is not None:
        # One of ours may listen on another address than 127.0.0.1, for example on ::1.
        return next((state.base_url for state in running if state.port == port), None) or checked_url(f"http://127.0.0.1:{port}")
    if len(running) > 1:
        raise ConfigError(
            f"{len(running)} servers are running", hint="say which: --port " + " or --port ".join(str(s.port) for s in running)
        )
    return running[0].base_url if running else f"http://127.0.0.1:{DEFAULT_PORT}"


def checked_url(url: str) -> str:
    """The URL itself. Raises: ConfigError when nothing could ever answer there."""
    example = "for example http://127.0.0.1:8888"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{url} has no possible port", hint=f"ports are 1 to 65535, {example}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{url} is not the address of a server", hint=example)
    return url


def read_key(call: Invocation) -> str:
    """The first key of `server.api_key_file`, or nothing. Keys come from files, never from flags."""
    name = call.settings.server.api_key_file
    if not name:
        return ""
    try:
        lines = Path(name).read_text(encoding="utf-8").split()
    except OSError as error:
        raise ConfigError(f"server.api_key_file {name} cannot be read: {error.strerror}", hint="one key per line") from None
    return lines[0] if lines else ""


def connect(call: Invocation, port: int | None, url: str | None) -> Api:
    return Api(find_url(call, port, url), read_key(call))
