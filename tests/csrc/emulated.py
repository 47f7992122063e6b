"""The kernels of packed weights on a CPU: the same sources, compiled against `emulator.h`."""

from __future__ import annotations

import ctypes
from functools import cache
from hashlib import sha256
from pathlib import Path

from csrc.loader import Library, load
from engine.native_library import default_build_dir
from engine.ops.cuda.library import SOURCES, Kernels

_HERE = Path(__file__).parent


@cache
def emulated_kernels() -> Kernels:
    """Built once per content of the sources; 'multiprocessors' is 1, so that every block walks through several units of work."""
    return Kernels.of(emulated_library("packed_gemm_emulated", SOURCES), num_processors=1, warpgroups=True)


def emulated_library(name: str, sources: tuple[str, ...]) -> ctypes.CDLL:
    """Of some sources."""
    version = sha256((_HERE / "emulator.h").read_bytes()).hexdigest()[:8]
    flags = ("-x", "c++", "-O1", f"-I{_HERE}", f"-DEMULATOR={version}", "-Wno-maybe-uninitialized", "-Wno-unknown-pragmas")
    library: ctypes.CDLL = load(Library(name, sources, flags=flags), default_build_dir())
    return library
