"""The bytes of the host cache: arena, copies, checksums. Knows frames and device rows, never tokens or keys."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine.cache_faults import FaultyTransfer
from engine.errors import ConfigError
from hicache.audit import crc_of, open_audit
from hicache.config import HiCacheConfig
from hicache.errors import MachineError
from hicache.gpu_transfer import BounceTransfer, ProbeRow
from hicache.host_cache import HostCache
from hicache.host_pool import HostArena, frame_bytes_for, map_arena
from hicache.index import NONE, PrefixIndex
from hicache.open_transfer import open_transfer
from hicache.peers import PeerMatch
from hicache.records import Kind, Record, Records
from hicache.recovery import Recovery, recover
from hicache.segment import CacheHome, Layout, Segment, open_segment
from hicache.transfer import CpuTransfer

if TYPE_CHECKING:
    from engine.kv_cache import KVCache

log = logging.getLogger(__name__)
_VERIFY_BYTES = 256 * 2**20  # compared when a segment is taken over, about 0.2 s; restores go on verifying samples
INTACT, BAD_STATE = -1, -2  # answers of `restore` besides the index of a bad page


class PageMover:
    """Moves pages between device blocks and frames, and windows between state slots and frames, through one staging buffer.

    A page's frame holds exactly one row of `kv.blocks`; a state fills `frames_per_state` frames.

    Raises:
        ConfigError: `num_bytes` is too little for one page and one state.
        MachineError: the arena cannot be mapped.
    """

    def __init__(self, config: HiCacheConfig, kv: KVCache, num_bytes: int, home: CacheHome | None = None, proof: bytes = b"") -> None:
        """home: where a segment that outlives this process is to be; None for private memory. proof: of the page keys' root."""
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
        self.segment: Segment | None = None
        if home is not None and config.segment == "auto":
            layout = Layout(num_frames, frame_bytes, self.frames_per_state, kv.block_size, home.ranks, proof)
            self.segment = _open_segment(home, layout)
        self.records = Records(self.segment) if self.segment is not None else None
        if self.segment is not None:
            self.arena = HostArena(num_frames, frame_bytes, self.segment)
        else:
            self.arena = map_arena(num_frames, frame_bytes)
            num_frames = self.arena.num_frames
        self._unpublished: deque[tuple[torch.cuda.Event, list[int], list[Record]]] = deque()
        self._open = open_transfer(config, self.arena, kv.blocks)
        self.transfer = FaultyTransfer(self._open.transfer)
        self._audit = open_audit(config.audit, num_frames, frame_bytes, kv.blocks.device)
        self._staging = torch.empty(self.frames_per_state, frame_bytes, dtype=torch.uint8, device=kv.blocks.device)
        self._window = self._staging.view(-1)[: kv.state_bytes]

    @property
    def ranks(self) -> memoryview | None:
        """Where the index keeps the ranks of pages so that they outlive this process; None without a segment."""
        return self.segment.ranks if self.segment is not None else None

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes of the arena; 0 on CPU."""
        return self._open.pinned_bytes

    @property
    def num_usable(self) -> int:
        """Frames that can be used from the beginning; the others come with `take_fresh`."""
        return self._open.num_usable

    @property
    def restore_gb_s(self) -> float:
        """Measured speed of restores; 0 when nothing was measured."""
        return self._open.restore_gb_s

    @property
    def probe_table(self) -> list[ProbeRow]:
        """What the start-up probe measured."""
        return self._open.table

    def take_fresh(self) -> list[range]:
        """Frames that were page-locked since the last call."""
        return self._open.take_fresh()

    def restore(self, pages: Sequence[int], blocks: Sequence[int], state: Sequence[int], slot: int, position: int) -> int:
        """Enqueue the copies of `pages` into `blocks`, and of the window at `position` into a state slot, if there is a state.

        Returns INTACT, or what a verified checksum refused: the index of a page, or BAD_STATE. Then the window is not loaded.
        """
        staging_rows = range(len(state))
        self.transfer.copy_in(pages, self._kv.blocks, blocks)
        if state:
            self.transfer.copy_in(state, self._staging, staging_rows)
        chosen = self._audit.choose(len(pages))
        if chosen is not None:
            bad = self._audit.first_bad([pages[i] for i in chosen], self._kv.blocks, [blocks[i] for i in chosen])
            if bad is not None:
                return chosen[bad]
            if state and self._audit.first_bad(state, self._staging, staging_rows) is not None:
                return BAD_STATE
        if state:
            self._kv.load_window(slot, position, self._window)
        return INTACT

    def restore_from_peer(self, match: PeerMatch, blocks: Sequence[int], slot: int) -> bool:
        """Copy a peer's leased pages and state into blocks and a state slot, and end the lease.

        False when the bytes are not those that the peer had described; then the window is not loaded.
        """
        peer, rows = match.peer, range(len(match.state))
        on_cpu = self._kv.blocks.device.type == "cpu"
        if peer.transfer is None:
            peer.transfer = CpuTransfer(peer.arena) if on_cpu else BounceTransfer(peer.arena)
        try:
            # Both engines have read the peer's frames when they return, so the lease can end then.
            peer.transfer.copy_in(match.pages, self._kv.blocks, blocks)
            peer.transfer.copy_in(match.state, self._staging, rows)
            intact = peer.unchanged(match) and (not on_cpu or self._as_described(match, blocks))
        finally:
            peer.release(match)
        if intact:
            self._kv.load_window(slot, match.tokens, self._window)
        return intact

    def _as_described(self, match: PeerMatch, blocks: Sequence[int]) -> bool:
        """Compare a sample of the pages, and the state, with the peer's checksums, as every restore does."""
        chosen = self._audit.choose(len(match.pages))
        if chosen is None:
            return True
        rows = [self._kv.blocks[block] for block in blocks] + list(self._staging)
        return all(match.records[i].checksum in (0, crc_of(rows[i])) for i in [*chosen, *range(len(match.pages), len(rows))])

    def store_pages(self, blocks: Sequence[int], frames: Sequence[int]) -> None:
        """Enqueue the copies of blocks into frames."""
        self.arena.reserve(frames)
        self.transfer.copy_out(self._kv.blocks, blocks, frames)
        self._audit.store(self._kv.blocks, blocks, frames)

    def store_state(self, slot: int, position: int, frames: Sequence[int]) -> None:
        """Enqueue the copy of a state slot's window at `position` into frames."""
        rows = range(len(frames))
        self.arena.reserve(frames)
        self._kv.save_window(slot, position, self._window)
        self.transfer.copy_out(self._staging, rows, frames)
        self._audit.store(self._staging, rows, frames)

    # -- for whoever reads or writes frames beside the stream --------------------------------------------------------------

    def frame(self, frame: int) -> memoryview:
        """The bytes of a frame."""
        begin = frame * self.arena.frame_bytes
        return self.arena.memory[begin : begin + self.arena.frame_bytes]

    def fence(self) -> Callable[[], None]:
        """A wait, from any thread, until every copy enqueued so far has left the frames alone."""
        if self._kv.blocks.device.type == "cpu":
            return _nothing_to_wait_for
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def reserve(self, frames: Sequence[int]) -> None:
        """Frames are about to be written. Raises MachineError when there is no memory for them."""
        self.arena.reserve(frames)

    def checksum(self, frame: int) -> int:
        """crc32 of a frame as it was stored, 0 when it is not known."""
        return self._audit.checksum(frame)

    def adopt(self, frames: Sequence[int], checksums: Sequence[int]) -> None:
        """Frames were filled with stored bytes whose crc32 are known."""
        for frame, checksum in zip(frames, checksums, strict=True):
            self._audit.adopt(frame, checksum)

    # -- what another process may know -------------------------------------------------------------------------------------

    def publish_pages(self, index: PrefixIndex, frames: Sequence[int]) -> None:
        """Pages were inserted into the index: describe them in the segment once their bytes are complete."""
        if self.records is not None:
            self._publish(list(frames), [self._page_record(index, frame) for frame in frames])

    def publish_state(self, index: PrefixIndex, state: int) -> None:
        """The same for a state."""
        if self.records is None:
            return
        frames, page = index.states.frames(state), index.parent[state]
        key, position, reason = index.key(page), index.position[state], index.states.reason[state]
        kinds = [Kind.STATE] + [Kind.MORE] * (len(frames) - 1)
        self._publish(
            frames,
            [
                Record(kind, key, page, following, position, 0, 0, self._audit.checksum(frame), reason)
                for kind, frame, following in zip(kinds, frames, [*frames[1:], NONE], strict=True)
            ],
        )

    def _page_record(self, index: PrefixIndex, frame: int) -> Record:
        tokens = index.first_token[frame], index.last_token[frame]
        return Record(
            Kind.PAGE, index.key(frame), index.parent[frame], NONE, index.position[frame], *tokens, self._audit.checksum(frame), 0
        )

    def _publish(self, frames: list[int], records: list[Record]) -> None:
        assert self.records is not None, "there is no segment"
        if self._kv.blocks.device.type == "cpu":
            self._write(frames, records)
            return
        event = torch.cuda.Event()
        event.record()
        self._unpublished.append((event, frames, records))

    def settle(self) -> None:
        """Describe what was stored behind copies that have completed meanwhile."""
        while self._unpublished and self._unpublished[0][0].query():
            _, frames, records = self._unpublished.popleft()
            self._write(frames, records)

    def _write(self, frames: list[int], records: list[Record]) -> None:
        assert self.records is not None, "there is no segment"
        for frame, record in zip(frames, records, strict=True):
            self.records.write(frame, record)

    def forget(self, frames: Sequence[int]) -> None:
        """Frames are given back: whoever reads the segment must not use them any more."""
        if self.records is None:
            return
        self.records.clear(frames)
        if self._unpublished:
            gone = set(frames)
            for _, waiting, records in self._unpublished:
                stays = [i for i, frame in enumerate(waiting) if frame not in gone]
                records[:] = [records[i] for i in stays]
                waiting[:] = [waiting[i] for i in stays]

    def recover(self, cache: HostCache) -> Recovery:
        """Take over what a former owner of the segment had stored. Its bytes are compared with their checksums, up to a budget."""
        if self.records is None or self.segment is None or not self.segment.reused:
            return Recovery()
        budget = _VERIFY_BYTES

        def intact(frame: int, record: Record) -> bool:
            nonlocal budget
            self._audit.adopt(frame, record.checksum)
            if record.checksum == 0 or budget <= 0:
                return True
            length = self.row_bytes if record.kind is Kind.PAGE else self.arena.frame_bytes
            budget -= length
            begin = frame * self.arena.frame_bytes
            return zlib.crc32(self.arena.memory[begin : begin + length]) == record.checksum

        return recover(cache, self.records, intact)

    def close(self) -> None:
        """Give page-locked memory and the segment's lock back while the device is still there. Idempotent."""
        self._open.close()
        if self.segment is not None:
            self.segment.close()


def _nothing_to_wait_for() -> None:
    """Copies are complete when their call returns."""


def _open_segment(home: CacheHome, layout: Layout) -> Segment | None:
    """The segment, or None with a warning: then the arena is private and what it holds dies with this process."""
    try:
        return open_segment(home, layout)
    except MachineError as error:
        log.warning("the host cache will not survive this process: %s (%s)", error, error.hint)
        return None
