"""The listening socket: bound before any weight is read, so that a taken port fails at once."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from server.errors import ConfigError, MachineError, PortInUse
from server.state import list_servers

BACKLOG = 1024


def bind(host: str, port: int, state_dir: Path) -> socket.socket:
    """Bind and listen. Port 0 takes any free one.

    Raises:
        PortInUse: names the server of ours that owns it, when it is one.
        ConfigError: the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"server.host is {host!r}: {error.strerror}", hint="--host 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    # Reuse of the address only skips the wait after a close; two servers on one port stay impossible.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} is used by {_owner(port, state_dir)}", hint="dix stop, or --port 0 for any free port") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"server.host is {host!r}: not an address of this machine", hint="--host 127.0.0.1") from error
        raise MachineError(f"cannot listen on {host}:{port}: {error.strerror}", hint="--port 0 for any free port") from error
    return listener


def _owner(port: int, state_dir: Path) -> str:
    for state in list_servers(state_dir):
        if state.port == port:
            return f'server "{state.name}" (pid {state.supervisor.pid})'
    return "another program"
