"""The compiled kernels of packed weights, index search, sampling and peers: built once per GPU architecture, argument types checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from csrc.loader import Library, bind, built_path, load
from engine.native_library import default_build_dir

# Major number of the one architecture with wgmma.
_WARPGROUPS = 9
SOURCES = (
    "kernels/packed_gemm.cu",
    "kernels/packed_tiles.cu",
    "kernels/packed_groups.cu",
    "kernels/expert_lists.cu",
    "kernels/expert_sum.cu",
    "kernels/sample_rows.cu",
    "kernels/index_scores.cu",
    "kernels/index_scores_joint.cu",
    "kernels/select_topk.cu",
    "kernels/peer_rows.cu",
)
HOST_SOURCES = ("kernels/peer_memory.cu",)  # calls of the CUDA runtime, which have no emulated form


class GemmArguments(ctypes.Structure):
    """`PackedGemm` of csrc/include/packed_weights.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "x", "y", "items", "num_items", "slots", "groups", "weights")),
        *((name, ctypes.c_int64) for name in ("x_stride", "x_group_stride", "y_stride", "y_group_stride")),
        *((name, ctypes.c_int) for name in ("tiles", "blocks", "rows", "num_rows", "num_groups", "x_divisor")),
        ("limit", ctypes.c_float),
    ]


class SampleArguments(ctypes.Structure):
    """`SampleRows` of csrc/include/sample_rows.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "modes", "numbers", "ids", "best", "top_p", "top_k", "min_p")),
        ("row_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_rows", "num_ids", "streams", "draws")),
    ]


class ScoreArguments(ctypes.Structure):
    """`IndexScores` of csrc/include/index_keys.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "weights", "seq", "count", "allowed", "blocks", "table", "out")),
        *((name, ctypes.c_int64) for name in ("block_bytes", "offset", "table_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_heads", "width", "num_allowed", "log_per_block", "log_size")),
        *((name, ctypes.c_int) for name in ("programs", "groups", "stages", "residents")),
    ]


class SelectArguments(ctypes.Structure):
    """`SelectRows` of csrc/kernels/select_topk.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "count", "out", "out64")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_rows", "columns", "k", "width", "room", "lists")),
    ]


class PeerArguments(ctypes.Structure):
    """`PeerMemory` of csrc/include/peer.cuh, field by field."""

    _fields_ = [
        ("boxes", ctypes.c_void_p * 8),
        *((name, ctypes.c_int64) for name in ("returned", "counter", "rows", "home")),
        *((name, ctypes.c_int) for name in ("rank", "num_ranks")),
        ("limit_ns", ctypes.c_int64),
    ]


class SendArguments(ctypes.Structure):
    """`SendRows` of csrc/kernels/peer_rows.cu, field by field."""

    _fields_ = [
        ("peers", PeerArguments),
        *((name, ctypes.c_void_p) for name in ("x", "ids", "slots", "copies", "weights", "real", "local_slots", "local_weights", "wanted")),
        *((name, ctypes.c_int) for name in ("num_rows", "capacity", "chosen", "most_copies", "slots_per_rank", "quads", "row_quads")),
    ]


class HomeArguments(ctypes.Structure):
    """`BringHome` of csrc/kernels/peer_rows.cu, field by field."""

    _fields_ = [
        ("peers", PeerArguments),
        *((name, ctypes.c_void_p) for name in ("computed", "local_slots", "wanted", "shared", "out")),
        *((name, ctypes.c_int) for name in ("num_rows", "capacity", "chosen", "quads", "parts", "wide")),
    ]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Bound launches; each returns a CUDA status. groups: as tiles, None where the device has no warpgroup products. num_processors:
    multiprocessors of the device.
    """

    gemm: Callable[..., int]
    tiles: Callable[..., int]
    groups: Callable[..., int] | None
    lists: Callable[..., int]
    sum: Callable[..., int]
    sample: Callable[..., int]
    scores: Callable[..., int]
    joint_scores: Callable[..., int]
    select: Callable[..., int]
    send_rows: Callable[..., int]
    bring_home: Callable[..., int]
    num_processors: int

    @staticmethod
    def of(library: ctypes.CDLL, num_processors: int, warpgroups: bool) -> Kernels:
        pointer, number = ctypes.c_void_p, ctypes.c_int
        many: list[type] = [ctypes.POINTER(GemmArguments), *[number] * 3, pointer]
        return Kernels(
            gemm=bind(library, "dix_packed_gemm", [ctypes.POINTER(GemmArguments), *[number] * 5, pointer]),
            tiles=bind(library, "dix_packed_tiles", many),
            groups=bind(library, "dix_packed_groups", [ctypes.POINTER(GemmArguments), *[number] * 4, pointer]) if warpgroups else None,
            lists=bind(library, "dix_expert_lists", [pointer, number, number, number, pointer, pointer, pointer, pointer]),
            sum=bind(library, "dix_expert_sum", [pointer, number, pointer, pointer, pointer, *[number] * 4, pointer]),
            sample=bind(library, "dix_sample_rows", [ctypes.POINTER(SampleArguments), pointer]),
            scores=bind(library, "dix_index_scores", [ctypes.POINTER(ScoreArguments), pointer]),
            joint_scores=bind(library, "dix_index_scores_joint", [ctypes.POINTER(ScoreArguments), pointer]),
            select=bind(library, "dix_select_topk", [ctypes.POINTER(SelectArguments), number, number, pointer]),
            send_rows=bind(library, "dix_send_rows", [ctypes.POINTER(SendArguments), number, pointer]),
            bring_home=bind(library, "dix_bring_home", [ctypes.POINTER(HomeArguments), number, pointer]),
            num_processors=num_processors,
        )


@dataclass(frozen=True, slots=True)
class PeerCalls:
    """Memory for other processes of the host. Each returns a CUDA status; `text` says what one means."""

    allocate: Callable[..., int]
    open: Callable[..., int]
    close: Callable[..., int]
    free: Callable[..., int]
    text: Callable[[int], bytes]

    @staticmethod
    def of(library: ctypes.CDLL) -> PeerCalls:
        pointer, handle = ctypes.c_void_p, ctypes.c_char_p
        text = library.dix_cuda_error
        text.restype, text.argtypes = ctypes.c_char_p, [ctypes.c_int]
        return PeerCalls(
            allocate=bind(library, "dix_peer_allocate", [ctypes.c_size_t, ctypes.POINTER(pointer), handle]),
            open=bind(library, "dix_peer_open", [handle, ctypes.POINTER(pointer)]),
            close=bind(library, "dix_peer_close", [pointer]),
            free=bind(library, "dix_peer_free", [pointer]),
            text=text,
        )


@cache
def peer_calls(device: int, build_dir: Path | None = None) -> PeerCalls:
    """Of the library of `kernels`. Raises BuildError as it does."""
    return PeerCalls.of(load(_library(device), build_dir or default_build_dir()))


@cache
def kernels(device: int, build_dir: Path | None = None) -> Kernels:
    """The kernels for a CUDA device, built on first use.

    Raises:
        BuildError: no nvcc, or its first error.
    """
    properties, library = torch.cuda.get_device_properties(device), load(_library(device), build_dir or default_build_dir())
    return Kernels.of(library, properties.multi_processor_count, properties.major == _WARPGROUPS)


def is_built(device: int, build_dir: Path | None = None) -> bool:
    """Whether `kernels` would return without compiling. Raises BuildError: there is no nvcc, which is needed to tell."""
    return built_path(_library(device), build_dir or default_build_dir()).exists()


def _library(device: int) -> Library:
    properties = torch.cuda.get_device_properties(device)
    # Products by warpgroups are in the instructions that only this architecture has.
    own = "a" if properties.major == _WARPGROUPS else ""
    return Library("packed_gemm", SOURCES + HOST_SOURCES, f"sm_{properties.major}{properties.minor}{own}")


def check_launch(status: int, what: str) -> None:
    """A launch that the driver refused is a broken invariant of ours. Raises RuntimeError with CUDA's number."""
    if status:
        raise RuntimeError(f"{what}: CUDA error {status} at launch")
