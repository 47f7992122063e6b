"""Choose how the arena and the device exchange bytes, once at start-up, and say so."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from csrc.loader import BuildError
from hicache.config import HiCacheConfig
from hicache.errors import MachineError
from hicache.gpu_transfer import BatchTransfer, BounceTransfer, KernelTransfer, ProbedTransfer, ProbeRow, probe
from hicache.host_pool import HostArena
from hicache.native import build_library
from hicache.pinning import PinnedArena, pin
from hicache.transfer import CpuTransfer, Transfer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenTransfer:
    """The chosen engine and what has to be given back. table: what the probe measured."""

    transfer: Transfer
    pinned: PinnedArena | None = None
    table: list[ProbeRow] = field(default_factory=list)

    @property
    def pinned_bytes(self) -> int:
        return self.pinned.arena.num_bytes if self.pinned is not None and self.pinned.borders else 0

    def close(self) -> None:
        if self.pinned is not None:
            self.pinned.close()


def open_transfer(config: HiCacheConfig, arena: HostArena, blocks: Tensor) -> OpenTransfer:
    """An engine for copies between `arena` and the device of `blocks` [N, row_bytes] uint8, whose content is not in use yet."""
    if blocks.device.type == "cpu":
        return OpenTransfer(CpuTransfer(arena))
    build_dir = Path(config.build_dir) if config.build_dir else Path.home() / ".cache" / "dix" / "native"
    try:
        library = build_library(build_dir, log.info)
        pinned = pin(arena, library)
    except (BuildError, MachineError) as error:
        log.warning("host cache copies go through a bounce buffer: %s (%s)", error, error.hint)
        return OpenTransfer(BounceTransfer(arena))
    batch = BatchTransfer(arena, library, pinned.borders)
    kernel = KernelTransfer(arena, library, pinned.pointer)
    if config.transfer != "auto":
        return OpenTransfer(kernel if config.transfer == "kernel" else batch, pinned)
    # Batched copies are refused on the legacy default stream, so they compete only when the model runs on another one.
    engines: list[Transfer] = [kernel, batch] if torch.cuda.current_stream().cuda_stream else [kernel]
    table = probe(engines, arena, blocks)
    for row in table:
        log.info("host cache copy %s, %s, %d pages: %.1f GB/s", row.engine, row.direction, row.num_pages, row.gb_s)
    return OpenTransfer(ProbedTransfer(engines, table), pinned, table)
