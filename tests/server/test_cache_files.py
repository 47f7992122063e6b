"""Whose cache memory stays and whose goes."""

from __future__ import annotations

from pathlib import Path

from hicache.segment import CacheHome, Layout, open_segment
from server.cache_files import keep_cache, remove_cache, remove_orphans, segments
from server.launch import disk_mark, secret_path, segment_name

LAYOUT = Layout(num_frames=4, frame_bytes=4096, frames_per_state=1, page_tokens=4, ranks=2, proof=b"p" * 32)


def server(base: Path, name: str, memory: Path) -> Path:
    """A server's directory with a secret and two segments, which no process holds."""
    directory = base / name
    directory.mkdir()
    secret_path(directory).write_bytes(b"s")
    for rank in range(2):
        open_segment(CacheHome(memory, segment_name(str(directory)), rank, 2, b"s", str(directory)), LAYOUT).close()
    return directory


def test_orphans_go_kept_ones_and_files_of_others_stay(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    gone, kept = server(tmp_path, "gone", memory), server(tmp_path, "kept", memory)
    keep_cache(kept)
    other = memory / "dix-notes-r0"
    other.write_text("not a segment")
    removed = remove_orphans(memory)
    assert len(removed) == 2
    assert not list(segments(gone, memory))
    assert len(list(segments(kept, memory))) == 2
    assert other.exists()


def test_removing_a_cache_takes_its_secret_along(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    directory = server(tmp_path, "one", memory)
    keep_cache(directory)
    assert remove_cache(directory, memory) == 2
    assert not list(memory.iterdir())
    assert not list(directory.iterdir())
    assert remove_cache(directory, memory) == 0


def test_pages_on_disk_keep_the_secret_that_finds_them(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    directory = server(tmp_path, "one", memory)
    disk_mark(directory).touch()
    assert remove_cache(directory, memory) == 2
    assert secret_path(directory).exists()
    disk_mark(directory).unlink()
    remove_cache(directory, memory)
    assert not secret_path(directory).exists()
