"""The file of prompts that a server prefills before it is ready. Standard library only: it is read before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError


def read_warm_file(path: str) -> list[dict[str, Any]]:
    """Bodies of a JSON lines file: {"messages": ...} as for chat, tools included, or {"prompt": ...}; empty lines do not count.

    Raises:
        ConfigError: the file cannot be read, or a line is neither; names the line.
    """
    if not path:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read server.warm {path!r}: {error}", hint="give a readable file of JSON lines") from error
    bodies = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not (isinstance(body.get("messages"), list) or isinstance(body.get("prompt"), str)):
            raise ConfigError(f"line {number} of server.warm {path!r} is no prompt", hint='{"messages": [...]} or {"prompt": "..."}')
        bodies.append(body)
    return bodies
