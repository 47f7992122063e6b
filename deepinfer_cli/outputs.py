"""Output files, the user's and those of a run: written completely or not at all, with errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError

# About the name, where nothing is wrong with the machine.
_NO_FILE = frozenset([errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENXIO])


@contextlib.contextmanager
def output(path: Path) -> Iterator[Path]:
    """Where to write: a file beside `path` that takes its place when the block ends well, so that a reader never sees half of the new one
    and a full disk leaves the old one. Its permissions stay. Directories above it are made. A link is followed; what is no file (a device,
    a pipe) is written to.

    Raises: ConfigError: no file can be there. OSError: what the machine lacks, with the path.
    """
    with named(path):
        if _is_special(path):
            yield path
            return
        real, temporary = _places(path)
        try:
            temporary.unlink(missing_ok=True)  # of a killed process that had our id, or a link that somebody laid there
            _take_mode(real, temporary)
            yield temporary
            _to_disk(temporary)
            os.replace(temporary, real)
        finally:
            temporary.unlink(missing_ok=True)


def _places(path: Path) -> tuple[Path, Path]:
    """The file behind all links, and the one beside it that is written first; makes the directories above them."""
    real = Path(os.path.realpath(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    if real.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return real, real.with_name(f".{os.getpid()}-{real.name}")  # the ending stays: it names a picture's format


def _take_mode(old: Path, new: Path) -> None:
    """Make `new`, empty, for those who may read `old`, if there is one: before anything is in it that others must not see."""
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(old.stat().st_mode)
        new.touch(0o600)
        new.chmod(mode)


def _to_disk(path: Path) -> None:
    """Wait until a file's bytes lie on the disk: many file systems find out only then that there is no room."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_json(path: Path, body: Any) -> None:
    """For people too: indented, one value a line. Raises: as `output`."""
    write_text(path, json.dumps(body, indent=1, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Raises: as `output`."""
    with output(path) as place:
        place.write_text(text, encoding="utf-8")


def check_output(path: Path) -> None:
    """Before minutes of work whose result is to go there. Raises: as `output`."""
    with named(path):
        if not _is_special(path):
            _, probe = _places(path)
            probe.touch()
            probe.unlink()


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """What the system refuses inside the block is told as being about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="name a file that can be made") from error
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _is_special(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
