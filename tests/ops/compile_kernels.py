"""Compiles kernels of attention's side for SM90 on any machine: `python -m tests.ops.compile_kernels [NAME ...]`.

Prints registers and shared bytes. Needs Triton, not a GPU, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from engine.ops.triton import (
    cache_rows,
    compress_entries,
    engram_gate,
    engram_gather,
    engram_hash,
    exchange_rows,
    hyper_boundary,
    index_search,
    row_attention,
    select_topk,
)

# Shared memory that one program may have on SM90.
MAX_SHARED_BYTES = 227 * 1024
_BF16, _F32, _I32, _I64, _U8 = "*bf16", "*fp32", "*i32", "*i64", "*u8"

_ATTEND = {"q_ptr": _I32, "rot_ptr": _F32, "window_ptr": _U8, "window_index_ptr": _I32, "second_ptr": _U8, "second_index_ptr": _I32,
           "sink_ptr": _F32, "out_ptr": _I32, "planes_ptr": _BF16, "part_ptr": _F32, "stat_ptr": _F32, "scale": "fp32"}  # fmt: skip
_HOPPER = {name.replace("second", "entry"): kind for name, kind in _ATTEND.items() if name != "planes_ptr"}
_COMBINE = {name: _ATTEND[name] for name in ("rot_ptr", "sink_ptr", "part_ptr", "stat_ptr", "out_ptr")}
_SELECT = {"score_ptr": _F32, "index_ptr": _I32, "count_ptr": _I64, "out_score_ptr": _F32, "out_index_ptr": _I32}
_SCORE = {"q_ptr": _I32, "weight_ptr": _BF16, "seq_ptr": _I64, "count_ptr": _I64, "allowed_ptr": _I32, "block_ptr": _U8,
          "table_ptr": _I64, "out_ptr": _F32}  # fmt: skip
_ENTRIES = {"projected_ptr": _F32, "partial_ptr": _F32, "load_ptr": _I64, "first_ptr": _I64, "last_ptr": _I64, "norm_ptr": _BF16,
            "rot_ptr": _F32, "latent_ptr": _BF16, "kv_ptr": _U8, "rows_ptr": _I64, "eps": "fp32"}  # fmt: skip
_KEYS = {"latent_ptr": _BF16, "weight_ptr": _BF16, "norm_ptr": _BF16, "rot_ptr": _F32, "block_ptr": _I64, "blocks_ptr": _U8,
         "place_ptr": _I64, "eps": "fp32"}  # fmt: skip
_SHAPE = {"D2": 256, "R2": 32}
_STREAMS = {"h": _BF16, "y": _BF16, "post": _F32, "comb": _F32, "pre": _F32, "norm": _BF16, "new_h": _BF16, "x": _BF16, "squares": _F32,
            "eps": "fp32"}  # fmt: skip
_MIX = {"z": _BF16, "fn": _F32, "parts": _F32}
_MIX_FEW = {"ROWS": 16, "COLS": 128, "STEPS": 2, "TERMS": False, "LAST": False, "EARLY": False, "FAST": True}
_MIX_MANY = {"ROWS": 64, "COLS": 64, "STEPS": 40, "FAST": True}
_BALANCE = {"parts": _F32, "squares": _F32, "scale": _F32, "base": _F32, "pre": _F32, "post": _F32, "comb": _F32, "hc_eps": "fp32",
            "rms_eps": "fp32"}  # fmt: skip
_HASH = dict.fromkeys(("grams", "multipliers", "primes", "offsets", "rows"), _I64)
_GATHER = {"rows": _I64, "table": _U8, "scale": _U8, "out": _BF16}
_GATE = {"h": _BF16, "kv": _BF16, "weight": _F32, "out": _BF16, "eps": "fp32", "root": "fp32"}
_ROWS = {"x": _I32, "ids": _I64, "weights": _F32, "slots": _I64, "copies": _I64, "real": _U8, "out": _I32}
_CHOICES = {"rows": _I32, "slots": _I64, "weights": _F32}

# name -> kernel, types of its arguments (others are int32), constants, warps.
KERNELS: dict[str, tuple[Any, Mapping[str, str], Mapping[str, Any], int]] = {
    "boundary few": (hyper_boundary.write_and_read, _STREAMS, {"HAS_Y": True, "COLS": 4096, "ONCE": "", "EARLY": False}, 16),
    "boundary many": (hyper_boundary.write_and_read, _STREAMS, {"HAS_Y": True, "COLS": 1024, "ONCE": "evict_first", "EARLY": True}, 4),
    "mix few": (hyper_boundary.mix, _MIX, _MIX_FEW, 4),
    "mix early": (hyper_boundary.mix, _MIX, _MIX_FEW | {"COLS": 256, "STEPS": 1, "EARLY": True}, 4),
    "mix many": (hyper_boundary.mix, _MIX, _MIX_MANY | {"TERMS": False, "LAST": False, "EARLY": False}, 4),
    "mix terms": (
        hyper_boundary.mix,
        _MIX | {"fn": _BF16},
        {"ROWS": 64, "COLS": 64, "STEPS": 40, "TERMS": True, "LAST": True, "FAST": True},
        4,
    ),
    "split terms": (hyper_boundary.split_terms, {"fn": _F32, "terms": _BF16}, {"COLS": 2048}, 4),
    "balance": (hyper_boundary.balance, _BALANCE, {"SPLITS": 128, "EARLY": True}, 1),
    "engram hash": (engram_hash.hash_rows, _HASH, {"GRAMS": 4, "HEADS": 8, "ROWS": 16, "LANES": 8}, 1),
    "engram gather": (engram_gather.gather_rows, _GATHER, {"WIDTH": 256, "GROUP": 32, "ROWS": 8}, 4),
    "engram gate": (engram_gate.gate_streams, _GATE, {"STREAMS": 4, "COLS": 8192}, 8),
    "pack rows": (exchange_rows.pack_words, _ROWS, {"HAS_REAL": True, "CHOSEN": 6, "SLOTS": 8, "WORDS": 1024}, 4),
    "local choices": (exchange_rows.split_choices, _CHOICES, {"CHOSEN": 6, "BLOCK": 256}, 4),
    "rank sums": (exchange_rows.add_sums, dict.fromkeys(("returned", "shared", "out"), _BF16), {"RANKS": 2, "BLOCK": 1024}, 4),
    "attend": (
        row_attention._attend,
        _ATTEND,
        _SHAPE | {"HEADS": 64, "N": 64, "ALONE": False, "SECOND_FP8": False, "FAST": True, "STAGES": 2},
        8,
    ),
    "combine": (row_attention._combine, _COMBINE, _SHAPE | {"HEADS": 4, "PARTS": 16}, 4),
    "select": (
        select_topk._select,
        _SELECT,
        {"CHUNK": 8192, "K": 512, "HAS_INDEX": False, "HAS_COUNT": True, "LAST": False},
        16,
    ),
    "score": (index_search._score, _SCORE, {"H": 32, "D2": 64, "N": 128, "SIZE": 8, "RESTRICTED": False, "FAST": True}, 4),
    "pack": (cache_rows._pack, {"x_ptr": _BF16, "out_ptr": _U8}, {"KIND": 1, "D2": 256, "N": 2}, 4),
    "entries": (compress_entries._entries, _ENTRIES, {"D": 512, "R2": 32, "N": 2, "PAIRS": True, "EARLY": True}, 4),
    "keys": (compress_entries._keys, _KEYS, {"D": 512, "K": 128, "R2": 32, "N": 16, "STEP": 128, "EARLY": True, "FAST": True}, 8),
}


# Kernels with layouts of their own: module and constants.
_LAID_OUT: dict[str, tuple[str, dict[str, Any]]] = {
    "attend hopper": ("row_attention_hopper", {"ALONE": False}),
    "attend roles 4": ("row_attention_roles", {"ALONE": True, "JOINED": False, "DECODERS": 4}),
    "attend joined 4": ("row_attention_roles", {"ALONE": False, "JOINED": True, "DECODERS": 4}),
    "attend roles 8": ("row_attention_roles", {"ALONE": False, "JOINED": False, "DECODERS": 8}),
}


def compile_kernel(name: str) -> Any:
    """The compiled kernel of `KERNELS` or `_LAID_OUT`."""
    target = GPUTarget("cuda", 90, 32)
    if name in _LAID_OUT:
        from triton.experimental.gluon._runtime import GluonASTSource

        module, constants = _LAID_OUT[name]
        attend = import_module(f"engine.ops.triton.{module}").attend
        return triton.compile(_source(GluonASTSource, attend, _HOPPER, constants), target=target, options={"num_warps": 8})
    kernel, types, constants, warps = KERNELS[name]
    return triton.compile(_source(ASTSource, kernel, types, constants), target=target, options={"num_warps": warps})


def _source(kind: Any, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    # Pointers are aligned and sizes divisible by 16, as at the released shape.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32")}
    return kind(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)


def _assembler(ptx: str) -> str:
    """What Triton's assembler says of a kernel."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "--verbose", "--gpu-name=sm_90a", "--output-file=/dev/null", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main() -> int:
    for name in sys.argv[1:] or [*KERNELS, *_LAID_OUT]:
        compiled = compile_kernel(name)
        products = compiled.asm["ptx"].count("wgmma.mma_async")
        print(f"{name:14s} {compiled.metadata.shared:7d} bytes shared, {products:3d} wgmma", flush=True)
        assert compiled.metadata.shared <= MAX_SHARED_BYTES, f"{name} asks for {compiled.metadata.shared} bytes"
        assert "serialized" not in (said := _assembler(compiled.asm["ptx"])), f"{name}: every product is waited for: {said}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
