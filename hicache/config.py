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
        0.04, "Most that restores may lengthen the steps of decoding requests, as a share; 0 means no limit.", unit="1", ge=0, le=1
    )
    transfer: str = knob("auto", "How pages move to and from a GPU; auto probes at start.", choices=("auto", "kernel", "batch"))
    pin: str = knob(
        "background",
        "When the arena is page-locked for a GPU: mostly after the server is ready, completely before, or never (bounce buffers).",
        choices=("background", "blocking", "never"),
    )
    numa: str = knob("gpu", "Memory node of the arena with a GPU: gpu for the GPU's own, none for the kernel's choice, or a number.")
    huge_pages: str = knob("try", "Huge pages for the arena with a GPU.", choices=("try", "off", "require"))
    native_keys: bool = knob(True, "Hash page keys with compiled code where the processor has SHA instructions.")
    native_index: bool = knob(True, "Look stored pages up with compiled code, in half the memory.")
    build_dir: str = knob("", "Where native copy code is built; empty is the user's cache directory.")
    states_per_path: int = knob(6, "Most window states kept at forks of one path.", unit="states", ge=1)
    state_interval_tokens: int = knob(16384, "Distance between window states inside a long prompt; 0 keeps none.", unit="tokens", ge=0)
    herd_min_tokens: int = knob(
        1024, "Shortest prefix for which a prompt waits while another computes it; 0 never waits.", unit="tokens", ge=0
    )
    herd_timeout_s: float = knob(2.0, "Longest wait for another prompt that makes no progress.", unit="s", gt=0)
    store_tail_state: bool = knob(True, "Also keep the window state at the last page end of a prompt (s1).")
    store_decode: str = knob(
        "auto",
        "Also store generated answers: when the next prompt of the conversation will contain them, always, or never.",
        choices=("auto", "on", "off"),
    )
    store_threshold: int = knob(1, "Store a page when this many requests have had it; 1 stores all.", unit="requests", ge=1)
    eviction: str = knob(
        "lru",
        "What is evicted first: the least recently used page, or (slru) the least recently used one that was never hit.",
        choices=("lru", "slru"),
    )
    scan_share: float = knob(
        0.25,
        "A prompt that stores more than this share of the arena is evicted first, unless it comes again; 1 treats all alike.",
        unit="1",
        gt=0,
        le=1,
    )
    replay: str = knob(
        "off",
        "When stored pages reach further than the last window state: compute from that state on (off), recompute one window (bounded: "
        "approximate, and what follows is not stored), or recompute one window per encoder layer (exact).",
        choices=("off", "bounded", "exact"),
    )
    isolation: str = knob(
        "none",
        "Who shares cached prefixes: everybody, requests of one API key, or requests that also send the same cache_salt.",
        choices=("none", "api_key", "field"),
    )
    segment: str = knob(
        "auto",
        "Where the arena is: in shared memory that survives a rank's death, or private to the rank.",
        choices=("auto", "private"),
    )
    share: bool = knob(True, "Ranks of one host restore from each other's arenas; needs segment=auto.")
    keep_on_exit: bool = knob(False, "Keep the arena when the server stops, for the next start of the same server.")
    disk_gb: float = knob(0.0, "Disk tier per rank, which survives every stop; 0 uses none.", unit="GiB", ge=0)
    disk_dir: str = knob("", "Directory of the disk tier; empty is the server's own.")
    disk_min_tokens: int = knob(256, "Least tokens worth reading from the disk tier; fewer are computed.", unit="tokens", ge=1)
    disk_exit_seconds: float = knob(5.0, "Longest time that a stopping rank writes to the disk tier.", unit="s", ge=0)
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
