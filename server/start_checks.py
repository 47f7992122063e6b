"""Checks before a server starts anything: exposed addresses, missing keys, too many ranks, occupied GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from server import gpu
from server.config import ServerConfig
from server.errors import ConfigError, MachineError
from server.launch import Launch
from server.processes import launch_gpus
from server.warm_file import read_warm_file

RANK_BYTES = 256 * 2**20  # what a rank takes that has loaded nothing but its libraries


def check_exposure(config: ServerConfig, keys: list[str], on_event: Callable[[dict[str, Any]], None]) -> None:
    """Raises ConfigError for an open address without a key where one is required; otherwise such an address is a warning."""
    if config.host not in ("127.0.0.1", "localhost", "::1") and not keys:
        if config.require_key:
            raise ConfigError(f"server.host is {config.host!r} and there is no API key", hint="--api-key-file FILE, or --host 127.0.0.1")
        message = f"listening on {config.host} without an API key: anyone who can reach this machine can use the model"
        on_event({"event": "warning", "message": message, "hint": "--api-key-file FILE"})


def check_warm_file(launch: Launch) -> None:
    """Before anything is loaded. Raises ConfigError."""
    if not read_warm_file(launch.server.warm):
        return
    if not launch.hicache.enabled:
        raise ConfigError("server.warm needs the host prefix cache", hint="--hicache-size-gb auto, or no --warm")
    if launch.hicache.isolation == "api_key":
        raise ConfigError("server.warm fills the cache of no API key", hint="hicache.isolation none or field, or no --warm")


def check_memory(ranks: int, available: int) -> None:
    """Raises MachineError when so many processes do not even fit without their model: starting them would take the machine down."""
    if ranks > 1 and ranks * RANK_BYTES > available:
        least, free = (f"{num_bytes / 2**30:,.1f} GiB" for num_bytes in (ranks * RANK_BYTES, available))
        raise MachineError(
            f"engine.dp is {ranks:,}: {ranks:,} ranks take {least} and more, {free} are free here",
            hint=f"--dp {max(1, available // RANK_BYTES):,} or less",
        )


def check_gpus(launch: Launch) -> None:
    """Raises MachineError when a foreign program computes on a GPU that a rank would get."""
    devices = [] if launch.engine.device == "cpu" or launch.server.share_gpu else launch_gpus(launch)
    if devices:
        gpu.check_unoccupied(gpu.gpu_processes(), devices)


def read_keys(path: str) -> list[str]:
    """Accepted keys, one per line; empty lines do not count.

    Raises:
        ConfigError: the file cannot be read or holds no key.
    """
    if not path:
        return []
    try:
        keys = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(
            f"cannot read server.api_key_file {path!r}: {error.strerror}", hint="give a readable file with one key per line"
        ) from error
    if not keys:
        raise ConfigError(f"server.api_key_file {path!r} holds no key", hint="write one key per line")
    return keys
