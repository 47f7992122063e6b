"""Files that a user names: whole or not at all, and told by name when they cannot be."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.outputs import check_output, output, write_text
from hicache.errors import ConfigError, machine_error
from tests.cli.test_report import four_requests, make_run

Dix = Callable[..., Any]


def test_a_file_appears_whole_with_its_directories_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "page.html"
    with output(target) as place:
        place.write_text("half")
        assert not target.exists()
        assert place.suffix == ".html"
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "dix.toml"
    target.write_text("old")
    code = (
        "import resource, sys; from pathlib import Path; from deepinfer_cli.outputs import write_text\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try: write_text(Path(sys.argv[1]), 'new' * 1000)\n"
        "except OSError as error: sys.stdout.write(f'{error.strerror}: {error.filename}')"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=True)
    assert ran.stdout == f"File too large: {target}"
    assert target.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_who_could_read_the_old_file_can_read_the_new_one_and_nobody_else(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "answers.jsonl"
    target.write_text("old")
    target.chmod(mode)
    with output(target) as place:
        place.write_text("new")
        assert stat.S_IMODE(place.stat().st_mode) == mode
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert target.read_text() == "new"


def test_a_link_in_the_place_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    """Somebody who may write to that directory too, as to /tmp, could lay it there."""
    with output(tmp_path / "x") as place:
        place.write_text("old")
    (tmp_path / "theirs").write_text("theirs")
    place.symlink_to("theirs")
    write_text(tmp_path / "x", "new")
    assert ((tmp_path / "theirs").read_text(), (tmp_path / "x").read_text()) == ("theirs", "new")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join(10)
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    check_output(pipe)  # opens nothing: a pipe without a reader would never answer


@pytest.mark.parametrize("write", [lambda path: write_text(path, "x"), check_output])
@pytest.mark.parametrize("name", ["directory", "file/below", "x" * 300, "loop"])
def test_what_can_be_no_file_is_told_by_name(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="cannot be written: ") as caught:
        write(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_what_the_machine_lacks_stays_the_machines_and_has_the_name(tmp_path: Path) -> None:
    def fill_the_disk() -> None:
        with output(tmp_path / "x") as place:
            place.symlink_to("/dev/full")
            place.write_text("y")

    with pytest.raises(OSError, match="No space left") as caught:
        fill_the_disk()
    refused = machine_error(caught.value)
    assert refused is not None
    assert str(tmp_path / "x") in str(refused)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "report --html {}", "report --csv {}", "report --parquet {}", "report --png {}", "config init {}", "model make-tiny {}",
        "bench engine --html {}", "tune prefill-interval --port 1 --html {}",
    ],
)  # fmt: skip
def test_no_command_takes_a_bad_path_for_a_bug(dix: Dix, home: Path, tmp_path: Path, line: str) -> None:
    make_run(home, "20260101-000000-smoke-aaaaaa", four_requests())
    (tmp_path / "file").write_text("")
    ran = dix(*line.format(tmp_path / "file" / "below").split())
    assert (ran.code, "this is a bug" in ran.err) in ((2, False), (4, False)), ran.err
    assert "cannot be written" in ran.err or ran.code == 4
