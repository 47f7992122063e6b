"""The halves of `packed_experts` on a GPU, for ranks that hold a share of the routed experts."""

from __future__ import annotations

from torch import Tensor

from engine.ops.cuda import packed_experts as whole
from engine.ops.cuda.library import Kernels
from engine.ops.cuda.packed_gemm import expert_sum, machine
from engine.ops.packed_experts import PackedExperts
from engine.ops.q8 import q8


def routed(
    x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool, summed: bool, ranks: int
) -> Tensor:
    """The op `routed_experts` on the current CUDA device."""
    run, stream = machine(x.device)
    return run_share(run, stream, x, ids, weights, experts, limit, quantize, summed, ranks)


def routed_invariant(
    x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, limit: float, quantize: bool, summed: bool, ranks: int
) -> Tensor:
    """`routed` with one order of every sum and one rounding of its parts."""
    run, stream = machine(x.device)
    return run_share(run, stream, x, ids, weights, experts, limit, quantize, summed, ranks, fixed=True)


def run_share(
    run: Kernels,
    stream: int,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    limit: float,
    quantize: bool,
    summed: bool,
    ranks: int,
    fixed: bool = False,
) -> Tensor:
    """`routed` with the kernels given, which may be the emulated ones."""
    ids = ids.contiguous()
    parts = whole.run_routed(run, stream, q8(x) if quantize else x, ids, weights, experts, limit, quantize, ranks, fixed, partial=True)
    if not summed:
        return parts.float().masked_fill_((ids < 0)[..., None], 0.0)
    out = x.new_empty(len(ids), experts.w2.rows)
    expert_sum(run, stream, parts, None, out, ids)
    return out


def shared(x: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    """The op `shared_expert` on the current CUDA device."""
    return run_shared(*machine(x.device), x, experts, limit, quantize)


def shared_invariant(x: Tensor, experts: PackedExperts, limit: float, quantize: bool) -> Tensor:
    """`shared` with one order of every sum."""
    return run_shared(*machine(x.device), x, experts, limit, quantize, fixed=True)


def run_shared(run: Kernels, stream: int, x: Tensor, experts: PackedExperts, limit: float, quantize: bool, fixed: bool = False) -> Tensor:
    """`shared` with the kernels given."""
    source = q8(x) if quantize else x
    act, out = whole.shared_buffers(source, experts)
    whole.run_shared(run, stream, source, experts, limit, quantize, act, out, fixed)
    return out
