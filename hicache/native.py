"""The cache's native code: built on first use, its status codes turned into exceptions."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from csrc.loader import Library, Progress, bind, load
from hicache.errors import MachineError


def build_library(cache_dir: Path, on_progress: Progress | None = None) -> ctypes.CDLL:
    """The native copies for this machine's GPU, built on first use. Raises `csrc.loader.BuildError`."""
    major, minor = torch.cuda.get_device_capability()
    sources = ("kernels/page_copy.cu", "host/batch_copy.cpp", "host/host_memory.cpp")
    return load(Library("page_copy", sources, f"sm_{major}{minor}"), cache_dir, on_progress)


def check_status(library: ctypes.CDLL, status: int, what: str) -> None:
    """Turn a CUDA status into an exception. Raises MachineError."""
    if status:
        text = ctypes.create_string_buffer(256)
        bind(library, "dix_error_text", [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t])(status, text, 256)
        raise MachineError(f"{what}: {text.value.decode()} ({status})", hint="--set hicache.transfer=batch, or --hicache-size-gb 0")
