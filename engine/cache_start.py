"""Makes a rank's prefix cache from the settings, or says why there is none."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.prefix_cache import PrefixCache
from hicache.build_directory import build_directory
from hicache.config import HiCacheConfig
from hicache.segment import CacheHome
from hicache.sizing import arena_bytes, available_host_bytes, check_size

if TYPE_CHECKING:
    from engine.kv_cache import KVCache
    from engine.limits import Limits

log = logging.getLogger(__name__)


def build_prefix_cache(
    config: HiCacheConfig, kv: KVCache, limits: Limits, ranks: int = 1, home: CacheHome | None = None
) -> PrefixCache | None:
    """The host cache of one rank, or None when it is off. home: where its memory may outlive this process.

    `auto` means off when decoder truncation is off: the cache restores no decoder windows, only recomputing the last tokens does.

    Raises:
        ConfigError: a size above 0 without decoder truncation. MachineError: a size beyond what is free.
    """
    if not config.enabled:
        return None
    if limits.keep_tokens <= 0:
        if config.size_gb == "auto":
            return None
        raise ConfigError(
            f"hicache.size_gb is {config.size_gb} but decoder truncation is off (--yoco-keep-tokens 0)",
            hint="--hicache-size-gb 0, or --yoco-keep-tokens 140",
        )
    num_bytes = arena_bytes(config, kv.blocks.device.type, ranks)
    if config.size_gb != "auto" and not (home is not None and home.path(home.rank).exists()):  # what a predecessor left is taken already
        check_size(num_bytes, ranks, available_host_bytes())
    if kv.blocks.device.type != "cpu" and num_bytes < kv.blocks.numel():
        log.warning("a host cache of %.1f GiB below %.1f GiB on the device only churns", num_bytes / 2**30, kv.blocks.numel() / 2**30)
    cache = PrefixCache(config, kv, limits.fingerprint, limits.keep_tokens, num_bytes=num_bytes, home=home)
    if config.native_keys or config.native_index:
        threading.Thread(target=_compile, args=(config, cache), name="hicache-native", daemon=True).start()
    return cache


def _compile(config: HiCacheConfig, cache: PrefixCache) -> None:
    """Compiled code may have to be built first; until it is there Python hashes and looks up."""
    if config.native_keys:
        cache.hash_compiled(build_directory(config))
    if config.native_index:
        cache.index_compiled(build_directory(config))
