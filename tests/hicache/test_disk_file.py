"""Files of the disk tier: what was whole is read again, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.disk_file import NO_PARENT, DiskFile, DiskFileRefused, DiskLayout, Entry, pack_record, unpack_record
from hicache.host_pool import HostArena
from hicache.records import Kind

LAYOUT = DiskLayout(page_tokens=4, frame_bytes=4096, page_bytes=100, frames_per_state=3, proof=b"p" * 32)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def page(number: int) -> Entry:
    return Entry(Kind.PAGE, key(number), key(number - 1) if number > 1 else NO_PARENT, 4 * number, number, number + 3, 0)


def state(number: int) -> Entry:
    return Entry(Kind.STATE, key(number), NO_PARENT, 4 * number, 0, 0, 4)


def frames(arena: HostArena, first: int, count: int) -> list[memoryview]:
    return [arena.memory[f * 4096 : (f + 1) * 4096] for f in range(first, first + count)]


def append(file: DiskFile, entry: Entry, views: Sequence[memoryview]) -> list[int]:
    checksums = LAYOUT.checksums(entry.kind, views)
    file.append(entry, views, checksums)
    return checksums


def arena_of(seed: int, count: int = 8) -> HostArena:
    arena = HostArena(count, 4096)
    for frame in range(count):
        arena.rows[frame].fill_((seed * 31 + frame) % 256)
    return arena


def filled(path: Path) -> tuple[int, list[int]]:
    """A file of two pages and a state. Returns its size and the offsets of its records."""
    file, arena = DiskFile(path, LAYOUT, create=True), arena_of(1)
    append(file, page(1), frames(arena, 0, 1))
    append(file, page(2), frames(arena, 1, 1))
    append(file, state(2), frames(arena, 2, 3))
    offsets = [at for at, _ in file.scan()]
    size = file.size
    file.close()
    return size, offsets


def test_records_are_found_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    _, offsets = filled(path)
    file, target = DiskFile(path, LAYOUT, create=False), HostArena(8, 4096)
    assert list(file.scan()) == list(zip(offsets, [page(1), page(2), state(2)], strict=True))
    assert file.read(offsets[2], key(2), frames(target, 0, 3)) is not None
    assert target.rows[:3].equal(arena_of(1).rows[2:5])
    assert file.read(offsets[0], key(2), frames(target, 0, 1)) is None  # another page's record
    file.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 36_863))
def test_file_cut_anywhere_keeps_exactly_the_whole_records_before_the_cut(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "a"
    size, offsets = filled(path)
    os.truncate(path, min(length, size))
    if length < 4096:
        with pytest.raises(DiskFileRefused):
            DiskFile(path, LAYOUT, create=False)
        return
    file = DiskFile(path, LAYOUT, create=False)
    whole = [at for at, end in zip(offsets, [*offsets[1:], size], strict=True) if end <= length]
    assert [at for at, _ in file.scan()] == whole
    append(file, page(3), frames(arena_of(2), 0, 1))  # goes on where the last whole record ends
    assert [entry.key for _, entry in file.scan()][-1] == key(3)
    file.close()


@pytest.mark.parametrize("at", [4096 + 5, 4096 + 4096 + 50, 3 * 4096 + 60])
def test_changed_byte_in_description_or_frame_is_noticed(tmp_path: Path, at: int) -> None:
    path = tmp_path / "a"
    _, offsets = filled(path)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    file, target = DiskFile(path, LAYOUT, create=False), HostArena(8, 4096)
    found = [file.read(offset, key(i + 1), frames(target, 0, 1)) for i, offset in enumerate(offsets[:2])]
    assert found.count(None) == 1
    file.close()


def test_slack_behind_a_page_is_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "a"
    _, offsets = filled(path)
    raw = bytearray(path.read_bytes())
    raw[offsets[0] + 4096 + 200] ^= 1
    path.write_bytes(raw)
    file = DiskFile(path, LAYOUT, create=False)
    assert file.read(offsets[0], key(1), frames(HostArena(1, 4096), 0, 1)) is not None
    file.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.__setitem__(0, 0), "not a file of the host cache"),
        (lambda raw: raw.__setitem__(20, 77), "torn header"),
    ],
)
def test_damaged_head_is_refused_with_a_reason(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "a"
    filled(path)
    raw = bytearray(path.read_bytes())
    change(raw)  # type: ignore[operator]
    path.write_bytes(raw)
    with pytest.raises(DiskFileRefused, match=message):
        DiskFile(path, LAYOUT, create=False)


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    other = DiskLayout(4, 4096, 100, 3, b"q" * 32)
    with pytest.raises(DiskFileRefused, match="another model"):
        DiskFile(tmp_path / "a", other, create=False)


@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("short", [True, False])
def test_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int, short: bool) -> None:
    path = tmp_path / "a"
    size, offsets = filled(path)
    file, calls, real = DiskFile(path, LAYOUT, create=False), [0], os.pwritev

    def failing(descriptor: int, parts: list[memoryview], at: int) -> int:
        calls[0] += 1
        if calls[0] < fails_at:
            return real(descriptor, parts, at)
        if short:
            return real(descriptor, [parts[0][:512]], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(OSError, match="space"):
        append(file, page(3), frames(arena_of(2), 0, 1))
    monkeypatch.undo()
    assert os.path.getsize(path) == size
    assert [at for at, _ in file.scan()] == offsets
    file.close()


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(0, 4095), st.integers(1, 255))
def test_description_survives_packing_and_any_changed_byte_in_it_is_noticed(
    name: bytes, token: int, count: int, at: int, change: int
) -> None:
    entry = Entry(Kind.STATE, name, NO_PARENT, 128, token, token, 3)
    block = pack_record(entry, list(range(count)), 4096)
    assert unpack_record(block) == (entry, list(range(count)))
    damaged = bytearray(block)
    damaged[at] ^= change
    found = unpack_record(bytes(damaged))
    assert found is None or (bytes(damaged[:100]) == block[:100] and found == (entry, list(range(count))))
