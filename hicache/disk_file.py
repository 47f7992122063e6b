"""Files of the disk tier: a header, then records of pages and states, appended. Whatever a crash leaves is readable up to the first
record that is not whole.

A record is a block of 4 KiB that describes its frames, with a checksum of itself and of every frame, and then the frames. Blocks and
frames are multiples of 4 KiB at multiples of 4 KiB, so that files can be opened past the page cache where the file system allows.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.records import Kind

MAGIC, SCHEMA, BLOCK = b"DIXDISK\0", 2, 4096  # schema 2: states at the end of answers
_FILE = struct.Struct("<8sIIIII32s")  # magic, schema, page tokens, frame bytes, page bytes, frames per state, proof
_RECORD = struct.Struct("<4sBBHIIIII32s32s")  # magic, kind, reason, frames, position, first and last token, frame bytes, spare, key, parent
_RECORD_MAGIC = b"DREC"
MAX_FRAMES = (BLOCK - _RECORD.size - 4) // 4
NO_PARENT = bytes(32)


class DiskFileRefused(Exception):
    """A file must not be used. The message says why."""


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """What the files of one cache have in common. page_bytes: of a frame that a page fills. proof: see `KeySpace.proof`."""

    page_tokens: int
    frame_bytes: int
    page_bytes: int
    frames_per_state: int
    proof: bytes

    def header(self) -> bytes:
        fixed = _FILE.pack(MAGIC, SCHEMA, self.page_tokens, self.frame_bytes, self.page_bytes, self.frames_per_state, self.proof)
        return (fixed + zlib.crc32(fixed).to_bytes(4, "little")).ljust(BLOCK, b"\0")

    def record_bytes(self, kind: Kind) -> int:
        return BLOCK + self.frame_bytes * (1 if kind is Kind.PAGE else self.frames_per_state)

    def checksums(self, kind: Kind, frames: Sequence[memoryview]) -> list[int]:
        """crc32 of each frame, of a page without the slack behind it: the same as in the segment's records."""
        checked = self.page_bytes if kind is Kind.PAGE else self.frame_bytes
        return [zlib.crc32(frame[:checked]) for frame in frames]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a record describes. parent: key of the previous page, or `NO_PARENT`; of a state its page's own key is `key`."""

    kind: Kind
    key: bytes
    parent: bytes
    position: int
    first_token: int
    last_token: int
    reason: int


def pack_record(entry: Entry, checksums: Sequence[int], frame_bytes: int) -> bytes:
    """The block in front of a record's frames."""
    fixed = _RECORD.pack(
        _RECORD_MAGIC,
        entry.kind,
        entry.reason,
        len(checksums),
        entry.position,
        entry.first_token,
        entry.last_token,
        frame_bytes,
        0,
        entry.key,
        entry.parent,
    )
    body = fixed + struct.pack(f"<{len(checksums)}I", *checksums)
    return (body + zlib.crc32(body).to_bytes(4, "little")).ljust(BLOCK, b"\0")


def unpack_record(block: bytes) -> tuple[Entry, list[int]] | None:
    """The entry and the checksums of its frames; None when the block is not a whole record."""
    if len(block) < BLOCK:
        return None
    magic, kind, reason, count, position, first, last, _, _, key, parent = _RECORD.unpack_from(block)
    end = _RECORD.size + 4 * count
    if magic != _RECORD_MAGIC or not 0 < count <= MAX_FRAMES or kind not in (Kind.PAGE, Kind.STATE):
        return None
    if zlib.crc32(block[:end]).to_bytes(4, "little") != block[end : end + 4]:
        return None
    return Entry(Kind(kind), key, parent, position, first, last, reason), list(struct.unpack_from(f"<{count}I", block, _RECORD.size))


class DiskFile:
    """One open file. Used by one thread."""

    def __init__(self, path: Path, layout: DiskLayout, *, create: bool) -> None:
        """Raises DiskFileRefused: torn, foreign or of other sizes. OSError: it cannot be opened or made."""
        self.path, self._layout = path, layout
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        self.descriptor = _open_direct(path, flags)
        self._block = mmap.mmap(-1, BLOCK)  # aligned as direct access needs it
        try:
            if create:
                self._block[:] = layout.header()
                _write_all(self.descriptor, [memoryview(self._block)], 0)
            else:
                self._check_header()
            self.size = os.fstat(self.descriptor).st_size
        except BaseException:
            os.close(self.descriptor)
            raise

    def _check_header(self) -> None:
        found, expected = self._read_block(0), self._layout.header()
        if found[:8] != MAGIC:
            raise DiskFileRefused(f"{self.path} is not a file of the host cache")
        if zlib.crc32(found[: _FILE.size]).to_bytes(4, "little") != found[_FILE.size : _FILE.size + 4]:
            raise DiskFileRefused(f"{self.path} has a torn header")
        if found != expected:
            raise DiskFileRefused(f"{self.path} was made by another model, cache format or server")

    def _read_block(self, at: int) -> bytes:
        got = os.preadv(self.descriptor, [self._block], at)
        return self._block[:got]

    def append(self, entry: Entry, frames: Sequence[memoryview], checksums: Sequence[int]) -> None:
        """Write a record at the end. After an OSError the file ends where it did before."""
        begin = self.size
        self._block[:] = pack_record(entry, checksums, self._layout.frame_bytes)
        try:
            # The description comes last: without it a record is no record.
            _write_all(self.descriptor, frames, begin + BLOCK)
            _write_all(self.descriptor, [memoryview(self._block)], begin)
        except OSError:
            os.ftruncate(self.descriptor, begin)
            raise
        self.size = begin + BLOCK + sum(len(frame) for frame in frames)

    def read(self, at: int, entry_key: bytes, frames: Sequence[memoryview]) -> list[int] | None:
        """Read the record at `at` into frames. Returns their checksums, or None when record or bytes are not those that were written."""
        found = unpack_record(self._read_block(at))
        if found is None or found[0].key != entry_key or len(found[1]) != len(frames):
            return None
        got = os.preadv(self.descriptor, list(frames), at + BLOCK)
        whole = got == sum(len(frame) for frame in frames) and self._layout.checksums(found[0].kind, frames) == found[1]
        return found[1] if whole else None

    def scan(self) -> Iterator[tuple[int, Entry]]:
        """(offset, entry) of every whole record. What follows the last one is cut off."""
        at = BLOCK
        while at + BLOCK <= self.size:
            found = unpack_record(self._read_block(at))
            if found is None:
                break
            end = at + BLOCK + len(found[1]) * self._layout.frame_bytes
            if len(found[1]) * self._layout.frame_bytes != self._layout.record_bytes(found[0].kind) - BLOCK or end > self.size:
                break
            yield at, found[0]
            at = end
        if at < self.size:
            os.ftruncate(self.descriptor, at)
            self.size = at

    def close(self) -> None:
        os.fdatasync(self.descriptor)
        os.close(self.descriptor)


def _open_direct(path: Path, flags: int) -> int:
    """Past the page cache where the file system can: what is on disk should not take memory a second time."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some systems make the file before they refuse the flag.
        return os.open(path, flags & ~os.O_EXCL, 0o600)


def _write_all(descriptor: int, parts: Sequence[memoryview], at: int) -> None:
    """Raises OSError when not everything could be written."""
    wanted = sum(len(part) for part in parts)
    if os.pwritev(descriptor, list(parts), at) != wanted:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
