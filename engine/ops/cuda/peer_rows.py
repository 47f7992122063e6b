"""Trips through the memory of peers on a GPU: one launch that sends rows and waits for those of all ranks, one for their results."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.ops.cuda.library import HomeArguments, Kernels, PeerArguments, SendArguments, check_launch
from engine.ops.cuda.packed_gemm import machine
from engine.ops.exchange_rows import row_words
from engine.ops.peer_rows import PeerMemory, Sent

_THREADS = 256


def send(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    slots: Tensor,
    copies: Tensor,
    real: Tensor | None,
    capacity: int,
    slots_per_rank: int,
    memory: PeerMemory,
) -> Sent:
    """The op `send_rows` on the current CUDA device."""
    return run_send(*machine(x.device), x, ids, weights, slots, copies, real, capacity, slots_per_rank, memory)


def home(computed: Tensor, sent: Sent, shared: Tensor | None, memory: PeerMemory) -> Tensor | None:
    """The op `bring_home` on the current CUDA device."""
    return run_home(*machine(computed.device), computed, sent, shared, memory)


def run_send(
    run: Kernels,
    stream: int,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    slots: Tensor,
    copies: Tensor,
    real: Tensor | None,
    capacity: int,
    slots_per_rank: int,
    memory: PeerMemory,
    threads: int = _THREADS,
) -> Sent:
    """`send` with the kernels given, which may be the emulated ones. threads: of a block, the same on all ranks."""
    (count, chosen), ranks = ids.shape, memory.layout.ranks
    width, words = row_words(x, chosen)
    # Named, or the memory of a copy would be given out again before the launch.
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    local = torch.empty(ranks * capacity, chosen, dtype=torch.int64, device=x.device)
    shares = torch.empty(ranks * capacity, chosen, device=x.device)
    wanted = torch.empty(count, dtype=torch.int32, device=x.device)
    arguments = SendArguments(
        peers=_peers(memory),
        x=x.data_ptr(),
        ids=ids.data_ptr(),
        slots=slots.data_ptr(),
        copies=copies.data_ptr(),
        weights=weights.data_ptr(),
        real=None if real is None else real.data_ptr(),
        local_slots=local.data_ptr(),
        local_weights=shares.data_ptr(),
        wanted=wanted.data_ptr(),
        num_rows=count,
        capacity=capacity,
        chosen=chosen,
        most_copies=slots.shape[1],
        slots_per_rank=slots_per_rank,
        quads=width // 4,
        row_quads=words // 4,
    )
    check_launch(run.send_rows(ctypes.byref(arguments), threads, stream), "send_rows")
    arrived = memory.section(memory.layout.arrivals, (ranks * capacity, words), torch.int32)
    return Sent(arrived[:, :width].view(x.dtype), local, shares, wanted)


def run_home(
    run: Kernels, stream: int, computed: Tensor, sent: Sent, shared: Tensor | None, memory: PeerMemory, threads: int = _THREADS
) -> Tensor | None:
    """`home` with the kernels given."""
    computed = computed.contiguous()
    shared = None if shared is None else shared.contiguous()
    out = None if shared is None else torch.empty_like(shared)
    arguments = HomeArguments(
        peers=_peers(memory),
        computed=computed.data_ptr(),
        local_slots=sent.slots.data_ptr(),
        wanted=sent.wanted.data_ptr(),
        shared=None if shared is None else shared.data_ptr(),
        out=None if out is None else out.data_ptr(),
        num_rows=len(sent.wanted),
        capacity=len(computed) // memory.layout.ranks,
        chosen=sent.slots.shape[1],
        quads=computed.shape[-1] * computed.element_size() // 16,
        parts=computed.ndim == 3,
        wide=computed.dtype == torch.float32,
    )
    check_launch(run.bring_home(ctypes.byref(arguments), threads, stream), "bring_home")
    return out


def _peers(memory: PeerMemory) -> PeerArguments:
    layout = memory.layout
    arguments = PeerArguments(
        returned=layout.returned,
        counter=layout.counter,
        rows=layout.arrivals,
        home=layout.home,
        rank=memory.rank,
        num_ranks=layout.ranks,
        limit_ns=int(memory.limit_s * 1e9),
    )
    arguments.boxes[: layout.ranks] = memory.addresses
    return arguments
