"""The disk tier: which pages and states lie in which file, within a budget. Bytes move on one thread; everything else here belongs to
the engine's thread.

Files are filled one after the other; when the budget is used up the oldest file goes, and with it whatever its pages were ancestors of.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hicache.disk_file import BLOCK, NO_PARENT, DiskFile, DiskFileRefused, DiskLayout, Entry
from hicache.errors import MachineError
from hicache.records import Kind

MOST_FILE_BYTES = 2**30
_FILES_PER_BUDGET = 8  # at least, so that the oldest file is a small part of what is stored
LOCK_PATIENCE_S = 5.0  # a killed process's lock goes moments after it
MANIFEST = "manifest.json"
log = logging.getLogger(__name__)
Wait = Callable[[], None]  # returns when the device has left the frames alone


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a record lies."""

    number: int
    at: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Item:
    """What is to be written. known: checksums of the frames as they were stored, 0 where unknown."""

    entry: Entry
    frames: list[memoryview]
    known: list[int]


@dataclass(slots=True)
class DiskCounters:
    """Cumulative since start."""

    written_bytes: int = 0
    read_bytes: int = 0
    loads: int = 0
    errors: dict[str, int] = field(default_factory=lambda: {"write": 0, "read": 0, "checksum": 0, "refused_file": 0})


@dataclass(slots=True)
class WriteResult:
    """What became of a batch: the slots that were written, whether the disk refused to take more, and what was damaged in memory."""

    slots: list[Slot] = field(default_factory=list)
    num_bytes: int = 0
    seconds: float = 0.0
    failed: bool = False
    damaged: Entry | None = None


class DiskStore:
    """Pages and states on disk under one directory, locked by one process.

    Raises:
        MachineError: the directory cannot be made, or another process uses it.
    """

    def __init__(self, directory: Path, layout: DiskLayout, budget_bytes: int) -> None:
        self.directory, self.layout, self.budget_bytes = directory, layout, budget_bytes
        self.file_bytes = max(BLOCK + layout.record_bytes(Kind.STATE), min(MOST_FILE_BYTES, budget_bytes // _FILES_PER_BUDGET))
        self.pages: dict[bytes, Slot] = {}
        self.states: dict[bytes, Slot] = {}
        self.counters = DiskCounters()
        self.full = False  # the disk refused a write; it is only read from then on
        self.epoch = 0
        self._sizes: dict[int, int] = {}  # file number -> bytes, ascending
        self._files: dict[int, DiskFile] = {}  # open ones; only the thread touches them
        self._lock = _take(directory)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hicache-disk")
        self._open_files()

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    # -- start -------------------------------------------------------------------------------------------------------------

    def _open_files(self) -> None:
        """Read what former processes left; files that are torn at their head or foreign go."""
        epoch = _read_epoch(self.directory / MANIFEST)
        for path in sorted(self.directory.glob("*.pages")):
            if path.stat().st_size == 0:  # killed between making it and writing its header
                path.unlink()
                continue
            try:
                number = int(path.stem)
                if epoch is None:
                    raise DiskFileRefused(f"{path} has no manifest that tells which pages were forgotten")
                file = DiskFile(path, self.layout, create=False)
            except (DiskFileRefused, OSError, ValueError) as error:
                log.warning("the host cache gives up a file on disk: %s", error)
                self.counters.errors["refused_file"] += 1
                path.unlink(missing_ok=True)
                continue
            for at, entry in file.scan():
                self._enter(Slot(number, at, entry))
            self._files[number], self._sizes[number] = file, file.size
        self.set_epoch(epoch or 0)
        self._drop_orphans()
        self._shrink(0)

    def _enter(self, slot: Slot) -> None:
        (self.pages if slot.entry.kind is Kind.PAGE else self.states)[slot.entry.key] = slot

    def _drop_orphans(self) -> None:
        """Forget pages without their ancestors, and states without their pages. From then on the table has parents before children."""
        kept: dict[bytes, Slot] = {}
        for slot in sorted(self.pages.values(), key=lambda s: s.entry.position):
            if slot.entry.parent == NO_PARENT or slot.entry.parent in kept:
                kept[slot.entry.key] = slot
        self.pages = kept
        self.states = {key: slot for key, slot in self.states.items() if key in kept}

    def _drop_files(self, numbers: set[int]) -> None:
        """Forget what lies in these files and the descendants of its pages. One pass: the engine waits for it, and tables are long."""
        gone: set[bytes] = set()
        for key, slot in self.pages.items():
            if slot.number in numbers or slot.entry.parent in gone:
                gone.add(key)
        for key in gone:
            del self.pages[key]
        self.states = {key: slot for key, slot in self.states.items() if slot.number not in numbers and key in self.pages}

    def set_epoch(self, epoch: int) -> None:
        """The cache was reset: what is on disk now must not be found by a later process either."""
        self.epoch = epoch
        temporary = self.directory / f"{MANIFEST}.tmp"
        temporary.write_text(json.dumps({"schema": 1, "epoch": epoch}))
        temporary.replace(self.directory / MANIFEST)

    # -- lookup ------------------------------------------------------------------------------------------------------------

    def reach(self, keys: Sequence[bytes], begin: int, most_pages: int) -> int:
        """Leading pages up to the deepest state on disk whose pages from `begin` on are all on disk; 0 for none."""
        end = begin
        while end < min(most_pages, len(keys)) and keys[end] in self.pages:
            end += 1
        return next((count for count in range(end, begin, -1) if keys[count - 1] in self.states), 0)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Records that turned out to be damaged."""
        for key in keys:
            self.pages.pop(key, None)
            self.states.pop(key, None)
        self._drop_orphans()

    # -- bytes -------------------------------------------------------------------------------------------------------------

    def write(self, batch: Sequence[Item], wait: Wait) -> Future[WriteResult]:
        """Append records. The frames must stay as they are until the result has been given to `written`."""
        batch_bytes = sum(self.layout.record_bytes(item.entry.kind) for item in batch)
        self._shrink(batch_bytes)
        last = max(self._sizes, default=0)
        begins_new = not self._sizes or self._sizes[last] + batch_bytes > self.file_bytes
        number = last + 1 if begins_new else last
        self._sizes.setdefault(number, BLOCK)  # its header
        return self._thread.submit(self._write, number, list(batch), wait)

    def _write(self, number: int, batch: list[Item], wait: Wait) -> WriteResult:
        result, began = WriteResult(), time.monotonic()
        try:
            wait()
            file = self._files.get(number)
            if file is None:
                file = self._files[number] = DiskFile(self.directory / f"{number:08}.pages", self.layout, create=True)
            for item in batch:
                checksums = self.layout.checksums(item.entry.kind, item.frames)
                if any(known not in (0, found) for known, found in zip(item.known, checksums, strict=True)):
                    result.damaged = item.entry  # neither it nor what builds on it is kept
                    break
                at = file.size
                file.append(item.entry, item.frames, checksums)
                result.slots.append(Slot(number, at, item.entry))
                result.num_bytes += file.size - at
        except OSError as error:
            log.warning("the host cache stops writing to %s: %s", self.directory, error.strerror or error)
            result.failed = True
        result.seconds = time.monotonic() - began
        return result

    def written(self, result: WriteResult) -> None:
        """Take the result of a finished write into the index."""
        for slot in result.slots:
            self._sizes[slot.number] = max(self._sizes[slot.number], slot.at + self.layout.record_bytes(slot.entry.kind))
            self._enter(slot)
        self.counters.written_bytes += result.num_bytes
        self.counters.errors["checksum"] += result.damaged is not None
        if result.failed:
            self.counters.errors["write"] += 1
            self.full = True

    def read(self, slots: Sequence[Slot], frames: Sequence[list[memoryview]], wait: Wait) -> Future[list[list[int]]]:
        """Read records into frames. The result holds the checksums of each record's frames; it ends before the first damaged one."""
        self.counters.loads += 1
        return self._thread.submit(self._read, list(slots), list(frames), wait)

    def _read(self, slots: list[Slot], frames: list[list[memoryview]], wait: Wait) -> list[list[int]]:
        wait()
        found: list[list[int]] = []
        for slot, into in zip(slots, frames, strict=True):
            file = self._files.get(slot.number)
            try:
                checksums = file.read(slot.at, slot.entry.key, into) if file is not None else None
            except OSError as error:
                log.warning("the host cache cannot read %s: %s", self.directory, error.strerror)
                self.counters.errors["read"] += 1
                break
            if checksums is None:
                self.counters.errors["checksum"] += file is not None
                break
            found.append(checksums)
            self.counters.read_bytes += self.layout.record_bytes(slot.entry.kind)
        return found

    def _shrink(self, coming_bytes: int) -> None:
        """Remove the oldest files until `coming_bytes` fit the budget."""
        removed: set[int] = set()
        while self._sizes and self.num_bytes + coming_bytes > self.budget_bytes:
            number = min(self._sizes)
            del self._sizes[number]
            removed.add(number)
            self._thread.submit(self._remove, number)
        if removed:
            self._drop_files(removed)

    def _remove(self, number: int) -> None:
        file = self._files.pop(number, None)
        if file is not None:
            file.path.unlink(missing_ok=True)
            os.close(file.descriptor)

    def close(self) -> None:
        """Finish what is under way and let go of the directory. Idempotent."""
        self._thread.shutdown(wait=True)
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _take(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise MachineError(f"cannot use {directory} for the host cache: {error.strerror}", hint="--set hicache.disk_dir=...") from error
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise MachineError(f"{directory} is in use by another process", hint="dix status shows what is running") from None
            time.sleep(0.05)


def _read_epoch(path: Path) -> int | None:
    """How often the cache had been reset; None without a readable manifest."""
    try:
        return int(json.loads(path.read_text())["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
