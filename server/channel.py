"""JSON lines between the supervisor and its children, read without blocking."""

from __future__ import annotations

import json
import os
import socket
from typing import Any


class LineReader:
    """Cuts what arrives on a non-blocking descriptor into JSON objects."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.closed = False
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Every complete line that has arrived; sets `closed` at end-of-file."""
        lines: list[bytes] = []
        while not self.closed:
            try:
                data = os.read(self.descriptor, 65536)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self.closed = not data
            *complete, self._rest = (self._rest + data).split(b"\n")
            lines += complete
        return [json.loads(line) for line in lines if line]


def send_line(connection: socket.socket, message: dict[str, Any]) -> bool:
    """Send one message; False when the other side is gone, or has not read for so long that its buffer is full."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError, BlockingIOError):
        return False
    return True
