"""Choose how the arena and the device exchange bytes, once at start-up, and say so."""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from csrc.loader import BuildError
from hicache.build_directory import build_directory
from hicache.config import HiCacheConfig
from hicache.errors import MachineError
from hicache.gpu_transfer import PROBE_PAGES, BatchTransfer, BounceTransfer, KernelTransfer, ProbedTransfer, ProbeRow, probe
from hicache.host_pool import HostArena
from hicache.memory_node import ask_for_huge_pages, bind_to_node, huge_share, node_cpus, require_huge_pages, wanted_node
from hicache.native import build_library
from hicache.pinning import PinnedArena, pin
from hicache.transfer import CpuTransfer, Transfer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenTransfer:
    """The chosen engine and what has to be given back. table: what the probe measured. num_usable: frames that can be used at once."""

    transfer: Transfer
    num_usable: int
    pinned: PinnedArena | None = None
    table: list[ProbeRow] = field(default_factory=list)

    @property
    def pinned_bytes(self) -> int:
        return self.pinned.num_bytes if self.pinned is not None else 0

    @property
    def restore_gb_s(self) -> float:
        """Measured speed of large restores; 0 when nothing was measured."""
        rates = [row.gb_s for row in self.table if row.direction == "in"]
        return max(rates, default=0.0)

    def take_fresh(self) -> list[range]:
        """Frames that became usable since the last call."""
        return self.pinned.take_fresh() if self.pinned is not None else []

    def close(self) -> None:
        if self.pinned is not None:
            self.pinned.close()


def open_transfer(config: HiCacheConfig, arena: HostArena, blocks: Tensor) -> OpenTransfer:
    """An engine for copies between `arena` and the device of `blocks` [N, row_bytes] uint8, whose content is not in use yet.

    Raises:
        MachineError: `hicache.huge_pages` is require and there are none.
    """
    if blocks.device.type == "cpu":
        return OpenTransfer(CpuTransfer(arena), arena.num_frames)
    if config.pin == "never":
        return OpenTransfer(BounceTransfer(arena), arena.num_frames)
    try:
        library = build_library(build_directory(config), log.info)
        pinned = _place_and_pin(config, arena, library, blocks.device)
    except (BuildError, MachineError) as error:
        log.warning("host cache copies go through a bounce buffer: %s (%s)", error, error.hint)
        return OpenTransfer(BounceTransfer(arena), arena.num_frames)
    try:
        if config.huge_pages == "require":
            require_huge_pages(arena)
        transfer, table = _choose(config, arena, blocks, pinned)
    except BaseException:
        pinned.close()
        raise
    opened = OpenTransfer(transfer, pinned.num_bytes // arena.frame_bytes, pinned, table)
    pinned.register_rest()
    return opened


def _place_and_pin(config: HiCacheConfig, arena: HostArena, library: ctypes.CDLL, device: torch.device) -> PinnedArena:
    """Bind the arena to its node, ask for huge pages, page-lock it. What a former owner left has to be there at once."""
    began, node = time.monotonic(), wanted_node(config.numa, library)
    bound = node is not None and bind_to_node(arena, node)
    if config.huge_pages != "off":
        ask_for_huge_pages(arena)
    background = config.pin == "background" and not arena.inherited
    pinned = pin(arena, library, background=background, device=device, cpus=node_cpus(node) if bound and node is not None else ())
    seconds, gib = time.monotonic() - began, pinned.num_bytes / 2**30
    log.info(
        "host cache pinned: %.1f of %.1f GiB in %.1f s (%.1f GiB/s), memory node %s, %.0f %% on huge pages",
        gib,
        arena.num_bytes / 2**30,
        seconds,
        gib / max(seconds, 1e-9),
        node if bound else "any",
        100 * huge_share(arena.rows),
    )
    return pinned


def _choose(config: HiCacheConfig, arena: HostArena, blocks: Tensor, pinned: PinnedArena) -> tuple[Transfer, list[ProbeRow]]:
    """The engine that the setting names, or the fastest per direction and size; and what was measured."""
    batch = BatchTransfer(arena, pinned.library, pinned.borders)
    kernel = KernelTransfer(arena, pinned.library, pinned.pointer)
    # Batched copies are refused on the legacy default stream, so they compete only when the model runs on another one.
    engines: list[Transfer] = [kernel, batch] if torch.cuda.current_stream().cuda_stream else [kernel]
    if config.transfer != "auto":
        engines = [kernel if config.transfer == "kernel" else batch]
    num_frames = pinned.num_bytes // arena.frame_bytes
    scratch = arena.rows[max(0, num_frames - max(PROBE_PAGES)) : num_frames]
    inherited = scratch.clone() if arena.inherited else None
    table = probe(engines, num_frames, blocks)
    if inherited is not None:
        scratch.copy_(inherited)
    for row in table:
        log.info("host cache copy %s, %s, %d pages: %.1f GB/s", row.engine, row.direction, row.num_pages, row.gb_s)
    return (ProbedTransfer(engines, table) if len(engines) > 1 else engines[0]), table
