"""What the supervisor tells its children: one JSON file with every resolved setting and the paths of this boot."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from hicache.config import HiCacheConfig
from hicache.segment import CacheHome
from server.config import ServerConfig
from server.errors import ConfigError
from server.hosts import Hosts

MAX_SOCKET_PATH = 100  # bytes; sun_path holds 108
SHARED_MEMORY, SEGMENT_PREFIX = Path("/dev/shm"), "dix-"
BOOT_VARIABLE = "_DIX_BOOT_UUID"


def installed_version() -> str:
    try:
        return importlib.metadata.version("dix")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return ""


@dataclass(frozen=True, slots=True)
class Launch:
    """One boot of one server. `engine_factory` ("module:function") replaces the engine in tests; no setting reaches it.
    hosts: None when all ranks are on this host.
    """

    name: str
    boot_uuid: str
    engine: EngineConfig
    hicache: HiCacheConfig
    server: ServerConfig
    server_dir: str
    runtime_dir: str
    engine_factory: str = ""
    hosts: Hosts | None = None
    version: str = field(default_factory=installed_version)

    @property
    def local_ranks(self) -> int:
        """Ranks of this host; they count from 0 on every host."""
        return self.engine.dp if self.hosts is None else self.hosts.local_ranks(self.engine.dp)

    def group_rank(self, rank: int) -> int:
        """The number of a rank of this host among the ranks of all hosts."""
        return rank if self.hosts is None else self.hosts.number * self.local_ranks + rank

    @property
    def log_dir(self) -> Path:
        return Path(self.server_dir) / "logs"

    @property
    def boot_dir(self) -> Path:
        """Sockets and shared files of this boot; its name carries the boot id, so leftovers are recognisable."""
        return Path(self.runtime_dir) / self.boot_uuid[:8]

    @property
    def socket_path(self) -> Path:
        return self.boot_dir / "ranks"

    @property
    def socket_address(self) -> str:
        return f"ipc://{self.socket_path}"

    @property
    def heartbeat_path(self) -> Path:
        return self.boot_dir / "heartbeats"

    @property
    def served_name(self) -> str:
        return self.server.served_name or self.name

    def cache_home(self, rank: int) -> CacheHome:
        """Where a rank's cache memory is, the same for every boot of this server."""
        return CacheHome(SHARED_MEMORY, segment_name(self.server_dir), rank, self.local_ranks, self.read_cache_secret(), self.server_dir)

    def read_cache_secret(self) -> bytes:
        """What makes page keys and tenants' salts of this server unpredictable."""
        return secret_path(Path(self.server_dir)).read_bytes()

    def rendezvous_path(self, incarnation: int) -> Path:
        return self.boot_dir / f"rendezvous-{incarnation}"

    def prepare(self) -> Path:
        """Create the directories (0700), write the launch file (0600) and return its path.

        Raises:
            ConfigError: the socket path would be too long for the kernel.
        """
        length = len(os.fsencode(self.socket_path))
        if length > MAX_SOCKET_PATH:
            raise ConfigError(
                f"the runtime directory {self.runtime_dir!r} is too long: a socket in it takes {length} bytes of {MAX_SOCKET_PATH}",
                hint="set DIX_HOME to a shorter path, or without DIX_HOME set XDG_RUNTIME_DIR",
            )
        for directory in (Path(self.server_dir), self.log_dir, self.boot_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_cache_secret()
        mark = disk_mark(Path(self.server_dir))
        if self.hicache.disk_gb > 0:
            mark.touch(mode=0o600)
        else:
            mark.unlink(missing_ok=True)
        path = Path(self.server_dir) / "launch.json"
        temporary = path.with_suffix(".tmp")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self)))
        temporary.rename(path)
        return path

    def _make_cache_secret(self) -> None:
        """A fresh one, except when a cache was kept: its pages can only be found with the secret that their keys were made with."""
        path = secret_path(Path(self.server_dir))
        if path.exists():
            return
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))


def segment_name(server_dir: str) -> str:
    """What the names of a server's cache segments begin with."""
    return SEGMENT_PREFIX + hashlib.sha256(server_dir.encode()).hexdigest()[:16]


def secret_path(server_dir: Path) -> Path:
    return server_dir / "cache.secret"


def disk_mark(server_dir: Path) -> Path:
    """A file that exists while this server's pages are on disk, where they can be found with its secret only."""
    return server_dir / "cache.disk"


def load_launch(path: Path) -> Launch:
    """What the supervisor wrote for its children.

    Raises:
        ConfigError: dix was replaced since the supervisor started; settings and messages of two versions do not fit together.
    """
    data = path.read_bytes()
    written, found = msgspec.json.decode(data).get("version", ""), installed_version()
    if written != found:
        raise ConfigError(f"this server was started by dix {written}, and dix {found} is installed now", hint="dix stop, then dix start")
    return msgspec.json.decode(data, type=Launch)


def recorded_grace_s(path: Path) -> float:
    """The grace of a running server, whichever version wrote it."""
    return float(msgspec.json.decode(path.read_bytes()).get("server", {}).get("grace_s", ServerConfig().grace_s))


def resolve(target: str) -> Callable[..., Any]:
    """The function named "module:function"."""
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
