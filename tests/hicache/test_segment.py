"""Segments in shared memory: who may open which, and what their records say while a writer is killed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import MachineError
from hicache.records import Kind, Record, Records
from hicache.segment import HEADER_BYTES, LOG_ENTRIES, CacheHome, Layout, Segment, open_segment, read_origin

LAYOUT = Layout(num_frames=8, frame_bytes=4096, frames_per_state=2, page_tokens=4, ranks=2, proof=b"p" * 32)
PAGE = Record(Kind.PAGE, b"k" * 32, -1, -1, 4, 1, 2, 99, 0)


def home(directory: Path) -> CacheHome:
    return CacheHome(directory, "dix-test", 0, 2, b"s" * 32, "/some/server")


def write(directory: Path, layout: Layout = LAYOUT) -> Path:
    """A segment with one record, left by an owner that is gone."""
    segment = open_segment(home(directory), layout)
    Records(segment).write(3, PAGE)
    segment.epoch = 7
    segment.close()
    return segment.path


def reopen(directory: Path, layout: Layout = LAYOUT) -> Segment:
    return open_segment(home(directory), layout)


def test_next_owner_finds_records_and_epoch(tmp_path: Path) -> None:
    path = write(tmp_path)
    segment = reopen(tmp_path)
    assert segment.reused
    assert segment.epoch == 7
    assert Records(segment).read(3) == PAGE
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_origin(path) == "/some/server"
    assert b"s" * 32 not in path.read_bytes()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"proof": b"q" * 32}, "another model"),
        ({"num_frames": 9}, "other sizes"),
        ({"page_tokens": 8}, "other sizes"),
        ({"ranks": 4}, "other sizes"),
    ],
)
def test_segment_of_another_server_or_shape_is_refused_with_a_reason_and_replaced(tmp_path: Path, change: dict, word: str) -> None:
    write(tmp_path)
    segment = reopen(tmp_path, replace(LAYOUT, **change))
    assert not segment.reused
    assert word in segment.note
    assert Records(segment).read(3) is None


@pytest.mark.parametrize(
    ("at", "data", "word"),
    [(0, b"X", "not a cache segment"), (8, b"\x09", "torn header"), (30, b"\xff", "torn header"), (50, b"\x00", "torn header")],
)
def test_torn_header_is_refused_with_a_reason(tmp_path: Path, at: int, data: bytes, word: str) -> None:
    path = write(tmp_path)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    segment = reopen(tmp_path)
    assert not segment.reused
    assert word in segment.note


def test_other_files_are_nobodys_segments(tmp_path: Path) -> None:
    path = tmp_path / "dix-0-r0"
    for content in (b"", b"text", b"x" * 2 * HEADER_BYTES):
        path.write_bytes(content)
        path.chmod(0o600)
        assert read_origin(path) is None
    path.unlink()
    assert read_origin(path) is None


def test_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    os.truncate(path, 2 * HEADER_BYTES)
    assert "other sizes" in reopen(tmp_path).note


@pytest.mark.parametrize("how", ["readable", "linked", "symlink"])
def test_file_that_others_could_read_or_have_made_is_not_used(tmp_path: Path, how: str) -> None:
    path = write(tmp_path)
    if how == "readable":
        path.chmod(0o640)
    elif how == "linked":
        os.link(path, tmp_path / "second")
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    segment = reopen(tmp_path)
    assert not segment.reused
    assert segment.note
    assert path.stat(follow_symlinks=False).st_ino == os.fstat(segment._descriptor).st_ino


def test_segment_in_use_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.segment._LOCK_PATIENCE_S", 0.1)
    first = open_segment(home(tmp_path), LAYOUT)
    with pytest.raises(MachineError, match="in use"):
        reopen(tmp_path)
    assert first.path.exists()


def test_file_system_without_room_is_an_error_and_no_signal(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="GiB left"):
        open_segment(home(tmp_path), replace(LAYOUT, num_frames=2**38))


def test_torn_epoch_is_behind_every_epoch_that_was_used(tmp_path: Path) -> None:
    segment = open_segment(home(tmp_path), LAYOUT)
    segment.epoch = 5
    segment.mapping[256:264] = (6).to_bytes(8, "little")
    assert segment.epoch == 7


def test_cleared_or_half_written_record_is_absent_and_the_log_names_what_changed(tmp_path: Path) -> None:
    records = Records(open_segment(home(tmp_path), LAYOUT))
    records.write(1, PAGE)
    records.write(2, PAGE)
    seen = records.head
    records.clear([1, 5])
    assert records.read(1) is None
    assert list(records.changes(seen) or ()) == [1]
    records._turn(2)  # a writer killed in the middle
    assert records.read(2) is None
    records.recover()
    assert records.read(2) is None
    records.write(2, PAGE)
    assert records.read(2) == PAGE


def test_log_that_was_overrun_says_so(tmp_path: Path) -> None:
    records = Records(open_segment(home(tmp_path), LAYOUT))
    for _ in range(LOG_ENTRIES // 4 + 1):
        records.write(1, PAGE)
        records.clear([1])
    assert records.changes(0) is None


@settings(max_examples=150, deadline=None)
@given(byte=st.integers(0, 63), mask=st.integers(1, 255))
def test_any_changed_byte_of_a_record_makes_it_absent(byte: int, mask: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    records = Records(open_segment(home(tmp_path_factory.mktemp("segment")), LAYOUT))
    records.write(3, PAGE)
    at = HEADER_BYTES + 64 * 3 + byte
    records.segment.mapping[at] ^= mask
    found = records.read(3)
    assert found is None
    records.segment.close()
