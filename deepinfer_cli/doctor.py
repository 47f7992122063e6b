"""Probes of this machine and this installation. Every probe is guarded: the report always prints."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepinfer_cli.paths import Paths
from deepinfer_cli.units import show_bytes

LEAST_DISK_BYTES = 2 * 2**30
LEAST_MEMORY_BYTES = 4 * 2**30
PACKAGES = ("engine", "server", "hicache", "csrc")


@dataclass(frozen=True, slots=True)
class Finding:
    """One probe's result. verdict: ok; warn: works, slower or with less; fail: will not work. `fix` is something to paste."""

    probe: str
    verdict: str
    text: str
    fix: str = ""


def examine(paths: Paths, build_dir: str = "") -> list[Finding]:
    """All findings, in the order of reading. build_dir: the setting `engine.build_dir`."""

    def cpu_step() -> Finding:
        return native_step(build_dir)

    probes: list[Callable[[], Finding]] = [
        python, torch_build, packages, accelerator, compiler, cpu_step, memory, lambda: disk(paths), lambda: writable(paths), harness,
    ]  # fmt: skip
    return [_guarded(probe) for probe in probes]


def _guarded(probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except Exception as error:  # a probe that fails is a finding, not the end of the report
        name = getattr(probe, "__name__", "probe").strip("<>")
        return Finding(name, "warn", f"could not be examined: {type(error).__name__}: {error}")


def python() -> Finding:
    found = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", f"python {found}")
    return Finding("python", "warn", f"python {found} is not one of 3.11 to 3.13", "python3.11 -m venv .venv")


def torch_build() -> Finding:
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("torch", "fail", "torch is not installed", "make setup")
    import torch

    cuda = torch.version.cuda
    return Finding("torch", "ok", f"torch {found}, " + (f"CUDA {cuda}" if cuda else "built for CPU"))


def packages() -> Finding:
    """`engine` and `server` are common names: another project's package in the way must be said."""
    home = Path(__file__).resolve().parent.parent
    foreign = []
    for name in PACKAGES:
        where = importlib.import_module(name).__file__
        if where is None or Path(where).resolve().parent.parent != home:
            foreign.append(f"{name} from {where}")
    if foreign:
        return Finding(
            "packages", "fail", f"another project is in the way: {', '.join(foreign)}", "use an environment of its own: make setup"
        )
    return Finding("packages", "ok", "engine, server, hicache and csrc come from this installation")


def accelerator() -> Finding:
    import torch

    if not torch.cuda.is_available():
        present = shutil.which("nvidia-smi") is not None
        if present:
            return Finding("device", "warn", "a GPU driver is here, but torch sees no GPU", "install the CUDA build of torch")
        return Finding("device", "ok", f"no GPU; {os.cpu_count()} CPU cores")
    free = sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    return Finding("device", "ok", f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, {show_bytes(free)} free")


def compiler() -> Finding:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            line = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout.splitlines()
            return Finding("compiler", "ok", line[0] if line else path)
    return Finding("compiler", "warn", "no C++ compiler: copies of the host cache run in Python", "apt install g++")


def native_step(build_dir: str) -> Finding:
    """Whether the model's steps on a CPU run compiled, and from which file."""
    from csrc.loader import BuildError
    from engine.native_library import built_path, default_build_dir, instruction_level, is_built

    folder = Path(build_dir) if build_dir else default_build_dir()
    level = instruction_level() or f"the compiler's default for {platform.machine()}"
    try:
        if is_built(folder):
            return Finding("cpu step", "ok", f"compiled CPU step for {level}: {built_path(folder)}")
    except BuildError as error:
        return Finding("cpu step", "warn", f"models on the CPU run eagerly, several times slower: {error}", error.hint)
    return Finding("cpu step", "ok", f"compiled CPU step for {level}: not built yet, the first start builds it in the background")


def memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    if free < LEAST_MEMORY_BYTES:
        return Finding("memory", "warn", f"{show_bytes(free)} of memory free", "--hicache-size-gb 0.1 --dp 1")
    return Finding("memory", "ok", f"{show_bytes(free)} of memory free")


def disk(paths: Paths) -> Finding:
    folder = next(p for p in (paths.state, *paths.state.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if free < LEAST_DISK_BYTES:
        return Finding("disk", "warn", f"{show_bytes(free)} free at {folder}", "DIX_HOME=/somewhere/larger")
    return Finding("disk", "ok", f"{show_bytes(free)} free at {folder}")


def writable(paths: Paths) -> Finding:
    for folder in (paths.state, paths.cache, paths.runtime):
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
        if not os.access(nearest, os.W_OK):
            return Finding("folders", "fail", f"{folder} cannot be written", "DIX_HOME=/somewhere/writable")
    return Finding("folders", "ok", "state, cache and sockets can be written")


def harness() -> Finding:
    try:
        return Finding("aiperf", "ok", f"aiperf {importlib.metadata.version('aiperf')}")
    except importlib.metadata.PackageNotFoundError:
        return Finding("aiperf", "warn", "aiperf is not installed: dix bench run works, trace replay does not", "pip install 'dix[bench]'")


def describe_device() -> str:
    """One phrase, without loading torch: the driver's device files tell."""
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if count:
        return f"{count} GPU" + ("s" if count > 1 else "")
    return f"no GPU, {os.cpu_count()} CPU cores"


def environment_snapshot() -> dict[str, object]:
    """What a number needs beside it: stable facts about machine and software."""
    versions = {}
    for name in ("dix", "torch", "triton", "numpy", "httpx", "pandas", "aiperf", "openai"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import psutil

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": describe_device(),
        "versions": versions,
        "load_average": list(os.getloadavg()),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("DIX_", "DEEPINFER_", "OMP_", "CUDA_VISIBLE"))},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
