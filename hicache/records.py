"""What a segment says about each frame, so that another process can know what the arena holds.

Written by the owner only, after a frame's bytes are complete; cleared before they change. So a record that is present and intact
describes bytes that are complete and are not changing, whenever its writer was killed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from hicache.segment import LOG_ENTRIES, RECORD_BYTES, Segment

_RECORD = struct.Struct("<32siiIIIIBBHI")
_KIND_AT = 56
_CHECKED = _RECORD.size - 4


class Kind(IntEnum):
    """What a frame's record describes. EMPTY also means: being written."""

    EMPTY = 0
    PAGE = 1
    STATE = 2  # a state's first frame
    MORE = 3  # a further frame of a state


@dataclass(frozen=True, slots=True)
class Record:
    """One frame. key: of the page, or of the page that a state belongs to. parent: previous page (-1 none); of a state its page.
    following: the state's next frame (-1 none). checksum: crc32 of the bytes, 0 unknown.
    """

    kind: Kind
    key: bytes
    parent: int
    following: int
    position: int
    first_token: int
    last_token: int
    checksum: int
    reason: int


class Records:
    """The records of one segment, a generation per frame (odd while a record changes) and a log of the frames that changed."""

    def __init__(self, segment: Segment) -> None:
        layout = segment.layout
        self.segment, self.num_frames = segment, layout.num_frames
        self._memory = segment.mapping
        self._base = 4096
        view = memoryview(segment.mapping)
        self._generations = view[layout.generations_at : layout.generations_at + 4 * layout.num_frames].cast("I")
        self._head = view[layout.log_at : layout.log_at + 8].cast("Q")
        self._log = view[layout.log_at + 8 : layout.log_at + 8 + 4 * LOG_ENTRIES].cast("I")

    def write(self, frame: int, record: Record) -> None:
        """Describe a frame whose bytes are complete."""
        body = _RECORD.pack(
            record.key,
            record.parent,
            record.following,
            record.position,
            record.first_token,
            record.last_token,
            record.checksum,
            record.kind,
            record.reason,
            0,
            0,
        )[:_CHECKED]
        at = self._base + RECORD_BYTES * frame
        self._turn(frame)
        self._memory[at : at + RECORD_BYTES] = body + zlib.crc32(body).to_bytes(4, "little")
        self._turn(frame)
        self._announce(frame)

    def clear(self, frames: Sequence[int]) -> None:
        """The bytes of `frames` may change from now on."""
        for frame in frames:
            at = self._base + RECORD_BYTES * frame + _KIND_AT
            if self._memory[at] != Kind.EMPTY:
                self._turn(frame)
                self._memory[at] = Kind.EMPTY
                self._turn(frame)
                self._announce(frame)

    def read(self, frame: int) -> Record | None:
        """The intact record of a frame, or None: empty, torn, or changing right now."""
        generation = self._generations[frame]
        at = self._base + RECORD_BYTES * frame
        raw = self._memory[at : at + RECORD_BYTES]
        key, parent, following, position, first, last, checksum, kind, reason, _, crc = _RECORD.unpack(raw)
        if kind not in (Kind.PAGE, Kind.STATE, Kind.MORE) or zlib.crc32(raw[:_CHECKED]) != crc:
            return None
        if generation % 2 or self._generations[frame] != generation:
            return None
        return Record(Kind(kind), key, parent, following, position, first, last, checksum, reason)

    def generation(self, frame: int) -> int:
        return self._generations[frame]

    def recover(self) -> None:
        """A new owner begins: a generation that its writer left odd belongs to a record that was cut short."""
        for frame in range(self.num_frames):
            if self._generations[frame] % 2:
                self._memory[self._base + RECORD_BYTES * frame + _KIND_AT] = Kind.EMPTY
                self._turn(frame)

    @property
    def head(self) -> int:
        """Number of changes so far."""
        return self._head[0]

    def changes(self, since: int) -> Iterator[int] | None:
        """Frames that changed after the first `since` changes; None when the log no longer reaches back that far."""
        head = self.head
        if head - since > LOG_ENTRIES // 2:
            return None
        return (self._log[number % LOG_ENTRIES] for number in range(since, head))

    def _turn(self, frame: int) -> None:
        self._generations[frame] = (self._generations[frame] + 1) & 0xFFFFFFFF

    def _announce(self, frame: int) -> None:
        head = self._head[0]
        self._log[head % LOG_ENTRIES] = frame
        self._head[0] = head + 1
