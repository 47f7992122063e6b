"""The compiled CPU step: where it is kept, how it is built, what stands in its way. Imports no torch."""

from __future__ import annotations

import ctypes
import platform
import shutil
from pathlib import Path

from csrc.loader import BuildError, Library, build, content_hash
from engine.models import native_layout

SOURCES = tuple(
    f"host/cpu_{part}.cpp"
    for part in (
        "linear",
        "vectors",
        "streams",
        "attention",
        "experts",
        "engram",
        "rows",
        "team",
        "backbone",
        "select",
        "share",
        "draws",
        "draft",
    )
)
# Sums keep the order that the sources give them on every machine; only explicit fused operations are fused.
_FLAGS = ("-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wno-maybe-uninitialized")
_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}),
)


def default_build_dir() -> Path:
    """Where libraries go when the settings name no directory."""
    return Path.home() / ".cache" / "dix" / "native"


def cpu_library() -> Library:
    """What to build for this machine. Its instruction level is a flag, so that a shared cache holds one library per level."""
    level = instruction_level()
    march = (f"-march={level}", "-mprefer-vector-width=512") if level else ()
    return Library("cpu_step", SOURCES, flags=(*_FLAGS, *march))


def instruction_level() -> str:
    """The x86-64 level of this machine that the sources have vectors for, "" for the compiler's default."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        return ""
    line = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    flags = set(line.split())
    return next((level for level, needed in _LEVELS if needed <= flags), "")


def is_built(build_dir: Path) -> bool:
    """Whether `load_library` would return at once.

    Raises:
        BuildError: there is no compiler, which is needed to tell.
    """
    return built_path(build_dir).exists()


def built_path(build_dir: Path) -> Path:
    """Where the library for this machine is, or will be.

    Raises:
        BuildError: there is no compiler, which is needed to tell.
    """
    library = cpu_library()
    compiler = shutil.which(library.compiler)
    if compiler is None:
        raise BuildError(f"no compiler {library.compiler} in PATH", hint="install a C++20 compiler, for instance g++")
    return build_dir / f"{library.name}-{content_hash(library, compiler)}.so"


def load_library(build_dir: Path) -> ctypes.CDLL:
    """Build what is missing and load it. Several processes may call this at once: one builds, the others wait.

    Raises:
        BuildError: no compiler, or the first error that it reported.
    """
    library = ctypes.CDLL(str(build(cpu_library(), build_dir)))
    native_layout.declare(library)
    return library
