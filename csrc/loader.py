"""Build native sources on first use, keep the result, load it. Imports nothing of ours.

The library's name is a hash of everything that decides its content: sources, headers, flags, compiler and architecture; time stamps
decide nothing. One process builds, others wait for its lock.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent
INCLUDE = ROOT / "include"
BUILD_TIMEOUT_S = 600
_ERROR_LINE = re.compile(r"\b(error|fatal)\s*:")  # of the host compiler, nvcc and ptxas
Progress = Callable[[str], None]
_waiting: set[int] = set()  # threads of this process that wait for a lock


class BuildError(Exception):
    """A native source did not compile, or there is no compiler. Carries what the command line prints."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str = "", log: str = "") -> None:
        super().__init__(message)
        self.hint, self.log = hint, log


@dataclass(frozen=True, slots=True)
class Library:
    """What to build: sources relative to this package, for one GPU architecture ("" for host code)."""

    name: str
    sources: tuple[str, ...]
    arch: str = ""
    flags: tuple[str, ...] = ()

    @property
    def compiler(self) -> str:
        return "nvcc" if self.arch else "c++"


def load(library: Library, cache_dir: Path, on_progress: Progress | None = None) -> ctypes.CDLL:
    """The library, built if it is not in `cache_dir` yet. Calls into it release the interpreter lock.

    Raises:
        BuildError: no compiler, or the first error that it reported.
    """
    return ctypes.CDLL(str(build(library, cache_dir, on_progress)))


def built_path(library: Library, cache_dir: Path) -> Path:
    """Where the library is, or will be. Raises BuildError: no compiler, which is needed to tell."""
    return cache_dir / f"{library.name}-{content_hash(library, _compiler(library))}.so"


def _compiler(library: Library) -> str:
    compiler = shutil.which(library.compiler)
    if compiler is None:
        raise BuildError(f"{library.name} needs the compiler {library.compiler}, which is not in PATH", hint=f"install {library.compiler}")
    return compiler


def build(library: Library, cache_dir: Path, on_progress: Progress | None = None) -> Path:
    """Path of the built library. Raises BuildError."""
    compiler, target = _compiler(library), built_path(library, cache_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return target
    with _locked(target.with_suffix(".lock")):  # other versions of the library build meanwhile
        if not target.exists():  # another process may have built it while this one waited
            if on_progress is not None:
                on_progress(f"building {library.name} with {library.compiler}")
            _compile(library, compiler, target)
    return target


def content_hash(library: Library, compiler: str) -> str:
    """Names the content of a build. 16 hex digits."""
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    for part in (version, library.arch.encode(), *(flag.encode() for flag in command(library, compiler, Path()))):
        digest.update(len(part).to_bytes(4, "little") + part)
    for path in [*(ROOT / source for source in library.sources), *sorted(INCLUDE.glob("*.*h"))]:
        data = path.read_bytes()
        digest.update(path.name.encode() + len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def command(library: Library, compiler: str, target: Path) -> list[str]:
    """The compiler's command line."""
    sources = [str(ROOT / source) for source in library.sources]
    if library.arch:
        own = ["-O3", "-std=c++20", f"-arch={library.arch}", "-Xcompiler=-fPIC", "-lineinfo", "--threads=0"]
    else:
        own = ["-O3", "-std=c++20", "-fPIC", "-Wall"]
    return [compiler, *own, "-shared", f"-I{INCLUDE}", *library.flags, "-o", str(target), *sources]


def _compile(library: Library, compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        try:
            run = subprocess.run(command(library, compiler, output), capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(
                f"building {library.name} took more than {BUILD_TIMEOUT_S} s", hint="check the compiler and the load"
            ) from error
        if run.returncode:
            log = run.stderr + run.stdout
            raise BuildError(f"{library.name} does not compile: {first_error(log)}", hint="the whole output is in the log", log=log)
        os.replace(output, target)  # a reader sees a whole library or none


def first_error(log: str) -> str:
    """The first line in which a compiler names an error; what follows it is mostly consequence."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if _ERROR_LINE.search(line)), lines[-1] if lines else "no output")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel drops it when the process dies."""
    with path.open("w") as handle:
        _waiting.add(threading.get_ident())
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        finally:
            _waiting.discard(threading.get_ident())
        yield


def waits_for_build() -> bool:
    """Whether a thread of this process waits for a library that another builds. Any thread may ask."""
    return bool(_waiting)


def bind(library: ctypes.CDLL, name: str, argument_types: Sequence[type]) -> Callable[..., int]:
    """A C function that returns an int status, with checked argument types."""
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_int, list(argument_types)
    return function
