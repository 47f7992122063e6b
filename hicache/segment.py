"""Shared memory that outlives a rank: header, one record per frame, change log, ranks, leases, and the frames themselves.

A file in a memory file system, readable by its owner only. The rank that holds its lock is its only writer; peers map it read-only
apart from their own row of leases. A rank that is started again maps what the killed one left, after checking that the bytes were made
by the same weights, format and secret. The secret itself lies in the server's own directory and never here: the header holds a digest
that proves knowledge of it, from which no page key can be derived.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from hicache.errors import MachineError

MAGIC, SCHEMA = b"DIXHIC\0\1", 3  # 2: states at the end of answers; 3: ranks of pages
HEADER_BYTES, RECORD_BYTES, LOG_ENTRIES = 4096, 64, 1 << 16
_FIXED = struct.Struct("<8sIIIIQQ32s")  # magic, schema, page tokens, frames per state, ranks, frame bytes, frames, proof
_EPOCH_AT, _ORIGIN_AT, MAX_ORIGIN = 256, 512, 2048
_LOCK_PATIENCE_S = 5.0  # a killed owner's lock goes with its last reference, moments after the kill
_SLICE_BYTES = 16 * 2**20  # memory is reserved in slices of this, so that a full file system is an error and not a fatal signal
log = logging.getLogger(__name__)


class SegmentRefused(Exception):
    """There is a segment of that name which must not be used. The message says why."""


@dataclass(frozen=True, slots=True)
class CacheHome:
    """Where a server's segments are: one file per rank. origin: the server's own directory. secret: makes page keys unpredictable."""

    directory: Path
    prefix: str
    rank: int
    ranks: int
    secret: bytes
    origin: str = ""

    def path(self, rank: int) -> Path:
        return self.directory / f"{self.prefix}-r{rank}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes that a segment is made for. proof: see `KeySpace.proof`."""

    num_frames: int
    frame_bytes: int
    frames_per_state: int
    page_tokens: int
    ranks: int
    proof: bytes

    @property
    def generations_at(self) -> int:
        return HEADER_BYTES + _round(RECORD_BYTES * self.num_frames)

    @property
    def log_at(self) -> int:
        return self.generations_at + _round(4 * self.num_frames)

    @property
    def ranks_at(self) -> int:
        return self.log_at + _round(8 + 4 * LOG_ENTRIES)

    @property
    def leases_at(self) -> int:
        return self.ranks_at + _round(self.num_frames)

    @property
    def data_at(self) -> int:
        return self.leases_at + self.ranks * _round(16 + self.num_frames)

    @property
    def num_bytes(self) -> int:
        return self.data_at + self.num_frames * self.frame_bytes

    def lease_row_at(self, rank: int) -> int:
        return self.leases_at + rank * _round(16 + self.num_frames)

    def header(self) -> bytes:
        fixed = _FIXED.pack(
            MAGIC, SCHEMA, self.page_tokens, self.frames_per_state, self.ranks, self.frame_bytes, self.num_frames, self.proof
        )
        return fixed + zlib.crc32(fixed).to_bytes(4, "little")


class Segment:
    """An open segment. `reused`: what a former owner left is in it. `note`: why a former one was refused, or ""."""

    def __init__(self, path: Path, descriptor: int, layout: Layout, *, reused: bool, note: str = "", writable: bool = True) -> None:
        self.path, self.layout, self.reused, self.note = path, layout, reused, note
        self._descriptor = descriptor
        self._reserved = 0  # a former owner may have reserved less than all
        self.mapping = mmap.mmap(descriptor, layout.num_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)

    @property
    def epoch(self) -> int:
        """How often the cache was reset. Written twice, so that a write cut short shows."""
        first, second = struct.unpack_from("<QQ", self.mapping, _EPOCH_AT)
        # Behind a torn write both values are spent: neither may meet keys again.
        return int(first) if first == second else max(first, second) + 1

    @epoch.setter
    def epoch(self, value: int) -> None:
        struct.pack_into("<Q", self.mapping, _EPOCH_AT, value)
        struct.pack_into("<Q", self.mapping, _EPOCH_AT + 8, value)

    @property
    def ranks(self) -> memoryview:
        """One byte per frame, the owner's: see `PrefixIndex`. Each is whole, whenever its writer was killed."""
        return memoryview(self.mapping)[self.layout.ranks_at : self.layout.ranks_at + self.layout.num_frames]

    def reserve(self, frame: int) -> None:
        """Make sure that frames up to `frame` have memory behind them.

        Raises:
            MachineError: the file system is full.
        """
        layout = self.layout
        while frame >= self._reserved:
            count = max(1, _SLICE_BYTES // layout.frame_bytes)
            count = min(count, layout.num_frames - self._reserved)
            try:
                os.posix_fallocate(self._descriptor, layout.data_at + self._reserved * layout.frame_bytes, count * layout.frame_bytes)
            except OSError as error:
                raise MachineError(
                    f"{self.path.parent} has no room for the host cache: {error.strerror}",
                    hint="lower --hicache-size-gb, or --set hicache.segment=private",
                ) from error
            self._reserved += count

    def close(self) -> None:
        """Let go of the lock; the file stays. Tensors may still map the memory."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping holds the file open as well
            os.close(self._descriptor)
            self._descriptor = -1


def open_segment(home: CacheHome, layout: Layout) -> Segment:
    """This rank's own segment: the one that a former owner left, or a new one when there is none or it is refused.

    Raises:
        MachineError: the file cannot be made, or another process owns it.
    """
    path, note = home.path(home.rank), ""
    try:
        if (descriptor := _open_existing(path)) is not None:
            return _attach(path, descriptor, layout)
    except SegmentRefused as refusal:
        note = str(refusal)
        log.warning("what the host cache had stored is given up: %s", note)
    return _create(path, layout, home.origin, note)


def open_peer(path: Path, layout: Layout) -> Segment:
    """Another rank's segment of the same layout, to read. Its lock stays with its owner.

    Raises:
        SegmentRefused: it was not made for `layout`. OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        check_owner(path, descriptor)
        check_header(path, os.pread(descriptor, HEADER_BYTES, 0), os.fstat(descriptor).st_size, layout)
        return Segment(path, descriptor, layout, reused=True)
    finally:
        os.close(descriptor)  # the mapping keeps the file


def open_published(path: Path, proof: bytes) -> Segment:
    """A rank's segment for a reader outside the ranks, mapped read-only and without a part in its leases. proof: see `KeySpace.proof`.

    Raises:
        SegmentRefused: not a segment, or not of that model, format and server. OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        check_owner(path, descriptor)
        header = os.pread(descriptor, HEADER_BYTES, 0)
        if len(header) < HEADER_BYTES:
            raise SegmentRefused(f"{path} is not a cache segment")
        _, _, page_tokens, frames_per_state, ranks, frame_bytes, num_frames, _ = _FIXED.unpack(header[: _FIXED.size])
        layout = Layout(num_frames, frame_bytes, frames_per_state, page_tokens, ranks, proof)
        check_header(path, header, os.fstat(descriptor).st_size, layout)
        return Segment(path, descriptor, layout, reused=True, writable=False)
    finally:
        os.close(descriptor)  # the mapping keeps the file


def process_start(pid: int) -> int:
    """When a process began, in clock ticks since the host's start: tells a reused pid from the original. 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def _open_existing(path: Path) -> int | None:
    """The file, locked for us alone; None when there is none.

    Raises:
        SegmentRefused: not a plain file of ours alone. MachineError: another process holds it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SegmentRefused(f"{path} cannot be opened: {error.strerror}") from error
    try:
        check_owner(path, descriptor)
        _lock(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_owner(path: Path, descriptor: int) -> None:
    """Raises SegmentRefused unless it is a plain file that only we can read and that has no second name."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or facts.st_nlink != 1:
        raise SegmentRefused(f"{path} is not a private file of this user")


def _lock(path: Path, descriptor: int) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise MachineError(f"{path} is in use by another process", hint="dix status shows what is running") from None
            time.sleep(0.05)


def _attach(path: Path, descriptor: int, layout: Layout) -> Segment:
    try:
        check_header(path, os.pread(descriptor, HEADER_BYTES, 0), os.fstat(descriptor).st_size, layout)
    except BaseException:
        os.close(descriptor)
        raise
    return Segment(path, descriptor, layout, reused=True)


def check_header(path: Path, header: bytes, size: int, layout: Layout) -> None:
    """Whether a segment with that header was made for `layout`.

    Raises:
        SegmentRefused: torn, of another version, of other sizes, or made by another model, format or server.
    """
    expected = layout.header()
    if len(header) < HEADER_BYTES or header[:8] != MAGIC:
        raise SegmentRefused(f"{path} is not a cache segment")
    if zlib.crc32(header[: _FIXED.size]).to_bytes(4, "little") != header[_FIXED.size : _FIXED.size + 4]:
        raise SegmentRefused(f"{path} has a torn header")
    if header[:12] != expected[:12]:
        raise SegmentRefused(f"{path} was written by another version")
    if header[12 : _FIXED.size - 32] != expected[12 : _FIXED.size - 32] or size != layout.num_bytes:
        raise SegmentRefused(f"{path} has other sizes than this server's cache")
    if header[: _FIXED.size] != expected[: _FIXED.size]:
        raise SegmentRefused(f"{path} was made by another model, cache format or server")


def _create(path: Path, layout: Layout, origin: str, note: str) -> Segment:
    """A new empty file of that name; an old one loses its name, whoever still maps it."""
    free = os.statvfs(path.parent)
    if free.f_bavail * free.f_frsize < layout.num_bytes:
        raise MachineError(
            f"{path.parent} has {free.f_bavail * free.f_frsize / 2**30:.2f} GiB left, the host cache needs {layout.num_bytes / 2**30:.2f}",
            hint="lower --hicache-size-gb, or --set hicache.segment=private",
        )
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MachineError(f"cannot make {path}: {error.strerror}", hint="--set hicache.segment=private") from error
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(descriptor, layout.num_bytes)
    os.posix_fallocate(descriptor, 0, layout.data_at)
    name = origin.encode()[:MAX_ORIGIN]
    os.pwrite(descriptor, len(name).to_bytes(4, "little") + name, _ORIGIN_AT)
    # The header comes last: a file without it is no segment.
    os.pwrite(descriptor, layout.header(), 0)
    return Segment(path, descriptor, layout, reused=False, note=note)


def read_origin(path: Path) -> str | None:
    """The directory of the server that made a segment of ours; None when it is not one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        check_owner(path, descriptor)
        header = os.pread(descriptor, HEADER_BYTES, 0)
    except SegmentRefused:
        return None
    finally:
        os.close(descriptor)
    if header[: len(MAGIC)] != MAGIC or len(header) < HEADER_BYTES:
        return None  # somebody's file with such a name
    length = int.from_bytes(header[_ORIGIN_AT : _ORIGIN_AT + 4], "little")
    return header[_ORIGIN_AT + 4 : _ORIGIN_AT + 4 + min(length, MAX_ORIGIN)].decode("utf-8", "replace")


def _round(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096
