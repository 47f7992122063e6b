"""Building native code: once per content, with the first error on top."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

import csrc.loader
from csrc.loader import BuildError, Library, bind, build, built_path, first_error, load, waits_for_build

SOURCE = 'extern "C" int add(int a, int b) { return a + b; }\n'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree of its own."""
    (tmp_path / "include").mkdir()
    (tmp_path / "add.cpp").write_text(SOURCE)
    monkeypatch.setattr(csrc.loader, "ROOT", tmp_path)
    monkeypatch.setattr(csrc.loader, "INCLUDE", tmp_path / "include")
    return tmp_path


def test_source_is_built_loaded_and_called(root: Path) -> None:
    library = load(Library("add", ("add.cpp",)), root / "cache")
    assert bind(library, "add", [ctypes.c_int, ctypes.c_int])(2, 3) == 5


def test_second_build_of_the_same_content_only_finds_the_first(root: Path) -> None:
    messages: list[str] = []
    first = build(Library("add", ("add.cpp",)), root / "cache", messages.append)
    os.utime(root / "add.cpp", (0, 0))
    assert build(Library("add", ("add.cpp",)), root / "cache", messages.append) == first
    assert len(messages) == 1


def test_changed_source_header_or_flag_is_another_library(root: Path) -> None:
    library = Library("add", ("add.cpp",))
    paths = {build(library, root / "cache")}
    (root / "add.cpp").write_text(SOURCE + "// changed\n")
    paths.add(build(library, root / "cache"))
    (root / "include" / "x.h").write_text("")
    paths.add(build(library, root / "cache"))
    paths.add(build(Library("add", ("add.cpp",), flags=("-DX=1",)), root / "cache"))
    assert len(paths) == 4


def test_concurrent_builders_compile_once(root: Path) -> None:
    messages: list[str] = []
    workers = [threading.Thread(target=build, args=(Library("add", ("add.cpp",)), root / "cache", messages.append)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(messages) == 1


def test_who_waits_for_the_build_of_another_process_can_be_seen_to(root: Path) -> None:
    """It neither computes nor has a child that does, and is no hung process. Threads that other tests began may wait as well."""
    library = Library("add", ("add.cpp",))
    path = built_path(library, root / "cache").with_suffix(".lock")
    path.parent.mkdir()
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        worker = threading.Thread(target=build, args=(library, root / "cache"))
        worker.start()
        while worker.ident not in csrc.loader._waiting:
            time.sleep(0.001)
        assert waits_for_build()
    worker.join()
    assert worker.ident not in csrc.loader._waiting


def test_compile_error_names_its_first_line_and_leaves_nothing_behind(root: Path) -> None:
    (root / "add.cpp").write_text("int f() { return missing; }\nint g() { return also_missing; }\n")
    with pytest.raises(BuildError, match="missing") as failure:
        build(Library("add", ("add.cpp",)), root / "cache")
    assert "also_missing" not in str(failure.value)
    assert "also_missing" in failure.value.log
    assert failure.value.exit_code == 3
    assert [p.suffix for p in (root / "cache").iterdir()] == [".lock"]


def test_missing_compiler_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(BuildError, match="nvcc"):
        build(Library("add", ("add.cpp",), arch="sm_90"), root / "cache")


def test_first_error_skips_warnings() -> None:
    assert first_error("a.cu(1): warning #1: x\n\na.cu(2): error: y\nb.cu: error: z\n") == "a.cu(2): error: y"
    assert first_error("") == "no output"
