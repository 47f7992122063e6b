"""Everything that a server is started with, resolved, in one object. The same in the foreground and in the background."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import EngineConfig
from hicache.config import HiCacheConfig
from server.config import ServerConfig
from server.errors import ConfigError
from server.hosts import Hosts
from server.launch import Launch
from server.state import server_dir

MAX_NAME = 200  # bytes of a directory; a file system takes 255, less what is put behind it


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What to serve, as whom, and where its files go. api_keys: beside those of `server.api_key_file`. hosts: when the ranks are on several
    hosts, each with a supervisor and a front of its own. engine_factory: see `Launch`."""

    engine: EngineConfig
    hicache: HiCacheConfig
    server: ServerConfig
    name: str
    state_dir: Path
    runtime_dir: Path
    api_keys: tuple[str, ...] = ()
    hosts: Hosts | None = None
    engine_factory: str = ""

    @property
    def local_ranks(self) -> int:
        """Ranks of this host. Raises: ConfigError when they do not divide over the hosts."""
        return self.engine.dp if self.hosts is None else self.hosts.local_ranks(self.engine.dp)

    def launch(self) -> Launch:
        """One boot of it, with an id of its own.

        Raises:
            ConfigError: ranks that do not divide over the hosts, a name that cannot be a directory's.
        """
        _ = self.local_ranks  # an uneven division is refused before anything starts
        name, engine, server = self.name, self.engine, self.server
        if self.hosts is not None and self.hosts.number:
            name = f"{name}-host{self.hosts.number}"  # hosts may share a home directory
        if len(os.fsencode(name)) > MAX_NAME:
            raise ConfigError(f"the name {name[:24]!r}… takes {len(os.fsencode(name))} bytes", hint=f"--name of at most {MAX_NAME}")
        if server.max_active and (engine.max_num_seqs == "auto" or int(engine.max_num_seqs) > server.max_active):
            engine = replace(engine, max_num_seqs=server.max_active)
        return Launch(
            name=name,
            boot_uuid=str(uuid.uuid4()),
            engine=engine,
            hicache=self.hicache,
            server=server,
            server_dir=str(server_dir(self.state_dir, name)),
            runtime_dir=str(self.runtime_dir),
            engine_factory=self.engine_factory,
            hosts=self.hosts,
        )
