"""The structures of `csrc/include/cpu_model.h` and `cpu_draws.h`, field by field in the same order."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import Any


class Matrix(Structure):
    """A packed matrix, or the first of a stack of equal ones. format: 0 bf16, 1 fp32, 2 fp4. bytes: of one matrix."""

    _fields_ = (("data", c_void_p), ("bytes", c_int64), *((n, c_int32) for n in ("rows", "cols", "format", "unused")))


class Mix(Structure):
    _fields_ = (("fn", Matrix), ("base", c_void_p), ("scale", c_void_p))


class Attention(Structure):
    _fields_ = (
        *((n, Matrix) for n in ("wq_a_wkv", "wq_b", "wo_a", "wo_b", "wkv")),
        *((n, c_void_p) for n in ("q_norm", "kv_norm", "sink")),
    )


class Experts(Structure):
    _fields_ = (
        *((n, Matrix) for n in ("gate", "w13", "w2", "shared_w13", "shared_w2")),
        ("bias", c_void_p),
        *((n, c_int32) for n in ("count", "chosen", "held", "layer")),
    )


class Compressor(Structure):
    _fields_ = (
        ("wkv", Matrix),
        ("wk", Matrix),
        *((n, c_void_p) for n in ("norm", "k_norm", "partial")),
        ("kv_offset", c_int64),
        ("index_offset", c_int64),
    )


class Indexer(Structure):
    _fields_ = (
        ("wq_b", Matrix),
        ("weights", Matrix),
        ("kv_offset", c_int64),
        ("index_offset", c_int64),
        ("publishes", c_int32),
        ("restricted", c_int32),
    )


class Engram(Structure):
    _fields_ = (
        ("wkv", Matrix),
        *((n, c_void_p) for n in ("table", "scale", "weight", "multipliers", "primes", "offsets")),
        ("format", c_int32),
        ("pad_id", c_int32),
    )


class Layer(Structure):
    _fields_ = (
        ("attention", Attention),
        ("experts", Experts),
        ("attn_mix", Mix),
        ("ffn_mix", Mix),
        ("attn_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("compressor", POINTER(Compressor)),
        ("indexer", POINTER(Indexer)),
        ("engram", POINTER(Engram)),
        ("ring", c_void_p),
        ("ratio", c_int32),
        ("tap", c_int32),
    )


class Draft(Structure):
    _fields_ = (
        ("main_proj", Matrix),
        ("markov_head", Matrix),
        *((n, c_void_p) for n in ("main_norm", "norm", "markov_embed", "confidence", "taps")),
        *((n, c_int32) for n in ("markov_rank", "block_size", "noise_id", "tap_places")),
    )


class Model(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        ("stages", POINTER(Layer)),
        ("draft", POINTER(Draft)),
        ("embed", c_void_p),
        ("norm", c_void_p),
        ("head", Matrix),
        *((n, c_void_p) for n in ("plain_frequencies", "scaled_frequencies", "token_map", "exchange", "kv_rows", "index_rows")),
        ("kv_stride", c_int64),
        ("index_stride", c_int64),
        *((n, c_float) for n in ("rms_eps", "hc_eps", "swiglu_limit", "routed_scale", "gate_temperature")),
        *((n, c_int32) for n in ("num_layers", "num_stages", "boundary", "hidden", "vocab", "heads", "head_dim", "rope_dim", "q_rank")),
        *((n, c_int32) for n in ("groups", "group_rank", "inner", "index_heads", "index_dim", "index_topk", "candidate_blocks")),
        *((n, c_int32) for n in ("candidate_size", "sinkhorn_iters", "ngrams", "engram_columns", "engram_dim", "window", "ring_rows")),
        *((n, c_int32) for n in ("partial_rows", "block_size", "quantize_kv")),
    )


# `Choice` of `cpu_draws.h`: proposal, seed, position, top_p, temperature, min_p, top_k, mode, rows, nothing.
CHOICE = struct.Struct("=QQqqffiiii")

# Exchange of `cpu_model.h`: layer, rows, their number, results.
EXCHANGE = ctypes.CFUNCTYPE(None, c_int32, c_void_p, c_int32, c_void_p)
# Gather of `cpu_step.h`: what, rows, their number and width, results, their number.
GATHER = ctypes.CFUNCTYPE(None, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dix_large_pages": (None, [c_void_p, c_int64]),
    "dix_packed_bytes": (c_int64, [c_int32, c_int32, c_int32]),
    "dix_format": (c_int32, [c_void_p, c_int64]),
    "dix_pack": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p]),
    "dix_model_bytes": (c_int64, []),
    "dix_layer_bytes": (c_int64, []),
    "dix_open": (c_void_p, []),
    "dix_set_threads": (None, [c_void_p, c_int32, c_int32, c_int32]),
    "dix_close": (None, [c_void_p]),
    "dix_step": (None, [POINTER(Model), c_void_p, c_void_p, c_void_p]),
    "dix_step_shared": (None, [POINTER(Model), c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, GATHER, c_void_p]),
    "dix_step_greedy": (None, [POINTER(Model), c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "dix_step_drawn": (None, [POINTER(Model), c_void_p, c_void_p, c_int32, c_int32, c_char_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "dix_choice_bytes": (c_int64, []),
    "dix_choose": (None, [c_void_p, c_void_p, c_int64, c_int32, c_char_p, c_int32, c_void_p, c_void_p]),
    "dix_open_experts": (c_void_p, []),
    "dix_close_experts": (None, [c_void_p]),
    "dix_route": (None, [POINTER(Model), c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_void_p]),
    "dix_expert_parts": (None, [POINTER(Model), c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p]),
    "dix_draft": (None, [POINTER(Model), c_void_p, c_void_p, c_int32, c_void_p, c_void_p]),
    "dix_propose": (None, [POINTER(Model), c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "dix_draft_greedy": (None, [POINTER(Model), c_void_p, c_void_p, c_int32, c_void_p, c_void_p]),
    "dix_draft_drawn": (None, [POINTER(Model), c_void_p, c_void_p, c_int32, c_char_p, c_int32, c_void_p, c_void_p]),
}


def declare(library: ctypes.CDLL) -> None:
    """Give every function its types, and make sure that both sides mean the same structures."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    sizes = (library.dix_model_bytes(), library.dix_layer_bytes(), library.dix_choice_bytes())
    assert sizes == (ctypes.sizeof(Model), ctypes.sizeof(Layer), CHOICE.size), f"structures of {sizes} bytes differ from the library's"
