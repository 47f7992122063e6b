"""Where prefixes come from besides this rank's own prefills: a killed predecessor's arena, other ranks' arenas, the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.disk_tier import DiskTier
from engine.errors import ConfigError
from engine.page_mover import PageMover
from hicache.config import HiCacheConfig
from hicache.disk import DiskStore
from hicache.disk_file import DiskLayout
from hicache.host_cache import HostCache
from hicache.keys import KeySpace
from hicache.peers import OwnLeases, PeerMatch, Peers
from hicache.records import Kind
from hicache.recovery import Recovery
from hicache.segment import CacheHome

GIB = 2**30
DISK_DIRECTORY = "pages"
log = logging.getLogger(__name__)


class CacheSources:
    """Opens what the settings and the machine offer, in the order in which epochs have to be known.

    Raises:
        ConfigError, MachineError: the disk tier cannot be used as it is set.
    """

    def __init__(
        self, config: HiCacheConfig, keys: KeySpace, cache: HostCache, mover: PageMover, home: CacheHome | None, clock: Callable[[], float]
    ) -> None:
        self._config, self._keys, self._mover = config, keys, mover
        self._store = _open_disk(config, keys, cache, mover, home)
        self.recovery = self._recover(cache)
        self.disk = DiskTier(self._store, cache, mover, config.disk_min_tokens, clock) if self._store is not None else None
        self._peers = self._open_peers(cache, home, clock)

    def _recover(self, cache: HostCache) -> Recovery:
        """Take over what a killed predecessor had stored. Resets count: what was forgotten stays forgotten."""
        segment, store = self._mover.segment, self._store
        inherited = segment if segment is not None and segment.reused else None
        self._keys.resume(max(inherited.epoch if inherited is not None else 0, store.epoch if store is not None else 0))
        self.remember_epoch()
        if inherited is None:
            return Recovery()
        found = self._mover.recover(cache)
        log.info("host cache taken over: %d pages, %d states; %d frames dropped", found.pages, found.states, found.dropped)
        return found

    def _open_peers(self, cache: HostCache, home: CacheHome | None, clock: Callable[[], float]) -> Peers | None:
        segment = self._mover.segment
        if home is None or home.ranks == 1 or segment is None or not self._config.share:
            return None
        cache.pool.watch_leases(OwnLeases(segment, home.rank).leased)
        return Peers(home, segment.layout, clock)

    def remember_epoch(self) -> None:
        """Tell later processes how often the cache was reset."""
        if self._mover.segment is not None:
            self._mover.segment.epoch = self._keys.epoch
        if self._store is not None and self._store.epoch != self._keys.epoch:
            self._store.set_epoch(self._keys.epoch)

    def lease(self, keys: list[bytes], most_pages: int, least_tokens: int) -> PeerMatch | None:
        """A lease on what another rank holds of a prompt, when that are at least `least_tokens`."""
        return self._peers.find(keys, most_pages, least_tokens) if self._peers is not None else None

    def note_hit(self, key: bytes) -> None:
        """A prompt resumed at the state of that page."""
        if self.disk is not None:
            self.disk.note_hit(key)

    def step(self) -> None:
        """A scheduling step begins."""
        if self.disk is not None:
            self.disk.step(self._keys.epoch)

    def close(self) -> None:
        """Write what is worth keeping to disk, within its time. Idempotent."""
        if self.disk is not None and not self.disk.closed:
            self.disk.close(self._keys.epoch, self._config.disk_exit_seconds)
            store = self.disk.store
            log.info("host cache left on disk: %d pages, %d states in %s", len(store.pages), len(store.states), store.directory)

    def leaves(self) -> dict[str, Any]:
        """Figures of the disk tier; empty without one."""
        return self.disk.leaves() if self.disk is not None else {}


def _open_disk(config: HiCacheConfig, keys: KeySpace, cache: HostCache, mover: PageMover, home: CacheHome | None) -> DiskStore | None:
    """The disk tier of this rank, or None when it is off.

    Raises:
        ConfigError: there is nowhere to put it. MachineError: the directory cannot be used.
    """
    budget = int(config.disk_gb * GIB)
    if budget <= 0:
        return None
    if home is None or not (config.disk_dir or home.origin):
        raise ConfigError(f"hicache.disk_gb is {config.disk_gb} but there is no directory for it", hint="--set hicache.disk_dir=DIRECTORY")
    layout = DiskLayout(cache.page_tokens, mover.arena.frame_bytes, mover.row_bytes, cache.frames_per_state, keys.proof)
    if budget < 4 * layout.record_bytes(Kind.STATE):
        raise ConfigError(
            f"hicache.disk_gb is {config.disk_gb}, less than four window states",
            hint=f"at least {4 * layout.record_bytes(Kind.STATE) / GIB:.4f}, or 0 for off",
        )
    base = Path(config.disk_dir) / home.prefix if config.disk_dir else Path(home.origin) / DISK_DIRECTORY
    store = DiskStore(base / f"r{home.rank}", layout, budget)
    log.info("host cache on disk: %d pages, %d states in %s", len(store.pages), len(store.states), store.directory)
    return store
