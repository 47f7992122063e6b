"""Settings of the host prefix cache (section `hicache`)."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.knob import check_knobs, knob


@dataclass(frozen=True, slots=True)
class HiCacheConfig:
    """Every knob of the host prefix cache. `size_gb` counts GiB per rank, window states included."""

    size_gb: float | str = knob(
        "auto", "Host cache arena per rank, window states included; 0 turns the cache off.", unit="GiB", ge=0, common=True
    )
    state_slots: int = knob(0, "Most window states in the arena; 0 means no cap.", unit="states", ge=0, common=True)
    min_restore_tokens: int = knob(128, "Shortest prefix worth restoring.", unit="tokens", ge=1)
    max_restore_bytes_per_step: int = knob(512 * 2**20, "Most bytes restored in one engine step.", unit="bytes", gt=0)
    max_restore_share: float = knob(
        0.04, "Share by which restores may lengthen the steps of requests that decode; 0 means no limit.", unit="1", ge=0, le=1
    )
    transfer: str = knob("auto", "Copies beside a GPU: picked by a start-up probe, or one engine.", choices=("auto", "kernel", "batch"))
    pin: str = knob(
        "background",
        "Page-locking the arena beside a GPU: most of it after the server is ready, all of it before, or not at all (bounce buffers).",
        choices=("background", "blocking", "never"),
    )
    numa: str = knob("gpu", "Memory node of the arena beside a GPU: the GPU's, none for the kernel's choice, or a number.")
    huge_pages: str = knob("try", "Huge pages for the arena beside a GPU.", choices=("try", "off", "require"))
    native_keys: bool = knob(True, "Hash page keys with compiled code where the processor has SHA instructions.")
    native_index: bool = knob(True, "Look stored pages up with compiled code, in half the memory.")
    build_dir: str = knob("", "Where native copy code is built; empty is the user's cache directory.")
    states_per_path: int = knob(6, "Most window states kept at forks of one path.", unit="states", ge=1)
    state_interval_tokens: int = knob(16384, "Distance of window states within a long prompt; 0 keeps none.", unit="tokens", ge=0)
    herd_min_tokens: int = knob(1024, "A prompt waits for an equal prefix in progress of that length; 0 never waits.", unit="tokens", ge=0)
    herd_timeout_s: float = knob(2.0, "Longest wait for a prefix that makes no progress.", unit="s", gt=0)
    store_tail_state: bool = knob(True, "Also keep the window state at the last page end of a prompt (s1).")
    store_decode: str = knob(
        "auto",
        "Also store generated answers: where the next prompt of the conversation is known to contain them, always, or never.",
        choices=("auto", "on", "off"),
    )
    store_threshold: int = knob(1, "Store a page from that many requests with it on; 1 stores all.", unit="requests", ge=1)
    eviction: str = knob(
        "lru",
        "What leaves first: what was used longest ago, or of that what was not used again since it was stored.",
        choices=("lru", "slru"),
    )
    scan_share: float = knob(
        0.25,
        "A prompt that stores more than this share of the arena leaves first, unless it comes again; 1 treats all alike.",
        unit="1",
        gt=0,
        le=1,
    )
    replay: str = knob(
        "off",
        "What a prompt does whose stored pages reach further than the last window state: compute from that state on, recompute one window "
        "(approximate; what follows is not stored), or one window per encoder layer (exact).",
        choices=("off", "bounded", "exact"),
    )
    isolation: str = knob(
        "none",
        "Who may hit whose prefixes: everybody, requests of one API key, or those that also send one cache_salt.",
        choices=("none", "api_key", "field"),
    )
    segment: str = knob(
        "auto",
        "Where the arena lives: in shared memory that survives a rank's death, or private to the rank.",
        choices=("auto", "private"),
    )
    share: bool = knob(True, "Ranks of one host restore from each other's arenas; needs segment=auto.")
    keep_on_exit: bool = knob(False, "Keep the arena when the server stops, for the next start of the same server.")
    disk_gb: float = knob(0.0, "Disk below the arena, per rank, that survives every stop; 0 uses none.", unit="GiB", ge=0)
    disk_dir: str = knob("", "Where the disk tier lies; empty is the server's own directory.")
    disk_min_tokens: int = knob(256, "Fewer missing tokens are computed and not read from the disk tier.", unit="tokens", ge=1)
    disk_exit_seconds: float = knob(5.0, "Longest time that a stopping rank spends on writing to the disk tier.", unit="s", ge=0)
    audit: str = knob("sampled", "Checksums of stored pages.", choices=("off", "sampled", "full"))

    def __post_init__(self) -> None:
        check_knobs(self, "hicache")
        if isinstance(self.size_gb, str) and self.size_gb != "auto":
            raise ConfigError(f"hicache.size_gb is {self.size_gb!r}", hint="a number of GiB, 0 for off, or auto")
        if self.numa not in ("gpu", "none") and not self.numa.isdecimal():
            raise ConfigError(f"hicache.numa is {self.numa!r}", hint="gpu, none, or the number of a memory node")

    @property
    def enabled(self) -> bool:
        return self.size_gb == "auto" or float(self.size_gb) > 0
