"""The bytes of the host cache: arena, copies, checksums. Knows frames and device rows, never tokens or keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.cache_faults import FaultyTransfer
from engine.errors import ConfigError
from hicache.audit import open_audit
from hicache.config import HiCacheConfig
from hicache.host_pool import HostArena, frame_bytes_for
from hicache.open_transfer import open_transfer

if TYPE_CHECKING:
    from engine.kv_cache import KVCache

INTACT, BAD_STATE = -1, -2  # answers of `restore` besides the index of a bad page


class PageMover:
    """Moves pages between device blocks and frames, and windows between state slots and frames, through one staging buffer.

    A page's frame holds exactly one row of `kv.blocks`; a state fills `frames_per_state` frames.

    Raises:
        ConfigError: `num_bytes` is too little for one page and one state.
        MachineError: the arena cannot be mapped.
    """

    def __init__(self, config: HiCacheConfig, kv: KVCache, num_bytes: int) -> None:
        self._kv = kv
        self.row_bytes, self.state_bytes = kv.blocks.shape[1], kv.state_bytes
        frame_bytes = frame_bytes_for(self.row_bytes)
        self.frames_per_state = max(1, -(-kv.state_bytes // frame_bytes))
        num_frames = num_bytes // frame_bytes
        if num_frames < self.frames_per_state + 1:
            raise ConfigError(
                f"hicache.size_gb is {num_bytes / 2**30:.4f} GiB, less than one page and one window state",
                hint=f"at least {(self.frames_per_state + 1) * frame_bytes / 2**30:.4f} GiB, or 0 for off",
            )
        self.arena = HostArena(num_frames, frame_bytes)
        self._open = open_transfer(config, self.arena, kv.blocks)
        self.transfer = FaultyTransfer(self._open.transfer)
        self._audit = open_audit(config.audit, num_frames, frame_bytes, kv.blocks.device)
        self._staging = torch.empty(self.frames_per_state, frame_bytes, dtype=torch.uint8, device=kv.blocks.device)
        self._window = self._staging.view(-1)[: kv.state_bytes]

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of the arena; 0 on CPU."""
        return self._open.pinned_bytes

    def restore(self, pages: Sequence[int], blocks: Sequence[int], state: Sequence[int], slot: int, position: int) -> int:
        """Enqueue the copies of `pages` into `blocks`, and of the window at `position` into a state slot.

        Returns INTACT, or what a verified checksum refused: the index of a page, or BAD_STATE. Then the window is not loaded.
        """
        staging_rows = range(len(state))
        self.transfer.copy_in(pages, self._kv.blocks, blocks)
        self.transfer.copy_in(state, self._staging, staging_rows)
        chosen = self._audit.choose(len(pages))
        if chosen is not None:
            bad = self._audit.first_bad([pages[i] for i in chosen], self._kv.blocks, [blocks[i] for i in chosen])
            if bad is not None:
                return chosen[bad]
            if self._audit.first_bad(state, self._staging, staging_rows) is not None:
                return BAD_STATE
        self._kv.load_window(slot, position, self._window)
        return INTACT

    def store_pages(self, blocks: Sequence[int], frames: Sequence[int]) -> None:
        """Enqueue the copies of blocks into frames."""
        self.transfer.copy_out(self._kv.blocks, blocks, frames)
        self._audit.store(self._kv.blocks, blocks, frames)

    def store_state(self, slot: int, position: int, frames: Sequence[int]) -> None:
        """Enqueue the copy of a state slot's window at `position` into frames."""
        rows = range(len(frames))
        self._kv.save_window(slot, position, self._window)
        self.transfer.copy_out(self._staging, rows, frames)
        self._audit.store(self._staging, rows, frames)

    def close(self) -> None:
        """Give page-locked memory back while the device is still there. Idempotent."""
        self._open.close()
