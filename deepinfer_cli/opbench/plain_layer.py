"""One follower layer in plain PyTorch: bf16 weights and rows, library products, references of all other ops. What ours stands beside.

It is kept fair: static shapes, no gradient, captured into a graph where it can be, experts through the library's grouped product with the
tokens sorted beforehand.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import linear

from deepinfer_cli.opbench.case import Call, NotMeasured
from engine.layer_runs import LayerRun, LayerRuns
from engine.models.deepseek_v41 import Streams, written
from engine.models.packed_layers import PackedLinear, PackedMoE
from engine.ops.hyper_boundary import HYPER_BOUNDARY
from engine.ops.packed_experts import PackedExperts
from engine.ops.rms_norm import RMS_NORM
from engine.ops.rope import ROPE
from engine.ops.route_experts import ROUTE_EXPERTS
from engine.ops.sparse_attention import SPARSE_ATTENTION, Selection

# Rows of the bf16 caches: more than the L2 cache holds, far fewer than a whole cache of bf16 rows would need.
_ROWS = 2**17

Grouped = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor], PackedExperts], Call]


def plain_calls(runs: LayerRuns, run: LayerRun, layer: int, experts: tuple[Tensor, Tensor], grouped: Grouped) -> list[Call]:
    """The layer of `run` on the same streams. experts: bf16 copies w13 [E, C, 2I] and w2 [E, I, C]; grouped: makes their call."""
    width = runs.text.head_dim
    ring, entries = (torch.randn(_ROWS, width, device=experts[0].device).to(torch.bfloat16) for _ in range(2))
    return [_plain_call(runs, run, layer, state, ring, entries, experts, grouped) for state in run.states]


def compiled(call: Call, limit_s: float) -> Call:
    """The same call by torch.compile, compiled and run once.

    Raises:
        NotMeasured: it did not compile, or not within `limit_s` seconds.
    """
    fast: Call = torch.compile(call, dynamic=False)
    began = time.monotonic()
    try:
        with _time_limit(limit_s):
            fast()
            fast()
    except Exception as error:  # the compiler wraps what ends it in errors of its own
        torch._dynamo.reset()
        if time.monotonic() - began >= limit_s:
            raise NotMeasured(f"not compiled in {limit_s:.0f} s") from error
        raise NotMeasured(f"not compiled: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    return fast


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body of the main thread once the time is over."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"over after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _plain_call(
    runs: LayerRuns,
    run: LayerRun,
    layer: int,
    state: Streams,
    ring: Tensor,
    entries: Tensor,
    experts: tuple[Tensor, Tensor],
    grouped: Grouped,
) -> Call:
    text, rows, block = runs.text, run.inputs.encoder, runs.layers[layer].block
    attention, moe, eps = block.attention, block.ffn, block.eps
    assert isinstance(moe, PackedMoE), "the layer was not loaded packed"
    weights = [_dense(part) for part in (attention.wq_a_wkv, attention.wq_b, attention.wo_a, attention.wo_b)]
    wq_a_wkv, wq_b, wo_a, wo_b = weights
    rank, ratio = text.q_lora_rank, attention.ratio
    rot, inverse = rows.rotations.of(ratio), rows.rotations.inverse_of(ratio)
    places = rows.store_slots % _ROWS
    seen = [(ring, _within(rows.window))] + ([(entries, _within(state.picks.selection))] if state.picks is not None else [])

    def attend() -> tuple[Tensor, object]:
        entered = HYPER_BOUNDARY.reference(state.h, state.written, block.attn_mix, state.pre, block.attn_norm, eps)
        both = linear(entered.x, wq_a_wkv[0])
        latent = RMS_NORM.reference(both[:, :rank], attention.q_norm, eps)
        ring.index_copy_(0, places, ROPE.reference(RMS_NORM.reference(both[:, rank:], attention.kv_norm, eps), rot))
        q = linear(latent, wq_b[0]).view(-1, text.num_attention_heads, text.head_dim)
        o = ROPE.reference(SPARSE_ATTENTION.reference(ROPE.reference(q, rot), seen, attention.sink, text.head_dim**-0.5), inverse)
        parts = o.reshape(len(o), len(wo_a), -1).transpose(0, 1)
        y = linear(torch.bmm(parts, wo_a.transpose(1, 2)).transpose(0, 1).flatten(1), wo_b[0])
        return HYPER_BOUNDARY.reference(entered.h, written(y, entered), block.ffn_mix, entered.pre, block.ffn_norm, eps).x, entered

    x, _ = attend()
    ids, factors = ROUTE_EXPERTS.reference(moe.gate(x), moe.bias, moe.num_chosen, text.routed_scaling_factor)
    expert_call = grouped(x, ids, factors, experts, moe.experts)

    def call() -> Tensor:
        x, _ = attend()
        ROUTE_EXPERTS.reference(moe.gate(x), moe.bias, moe.num_chosen, text.routed_scaling_factor)
        out: Tensor = expert_call()
        return out

    return call


def _within(selection: Selection) -> Selection:
    """The same number of rows, inside the smaller caches."""
    return Selection(torch.where(selection.signed < 0, selection.signed, selection.signed % _ROWS))


def _dense(layer: object) -> Tensor:
    assert isinstance(layer, PackedLinear), "the layer was not loaded packed"
    assert layer.dense is not None, "the layer was loaded for batch-invariant steps"
    return layer.dense.weight
