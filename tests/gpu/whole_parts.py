"""What a run of the whole model measures of its runner alone: steps, what kernels take of them, long prompts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine.cuda_graph import CudaRecorder, NullRecorder
from engine.parallel.expert_exchange import Route
from engine.parallel.expert_setup import make_peers
from tests.gpu.whole_session import Session

# Part of a step -> parts of the names of its kernels; the first that fits.
KERNELS = {
    "exchange": ("nccl", "pack_words", "split_choices", "add_sums", "gather_rows", "send_rows", "bring_home"),
    "experts": ("Format)0", "expert_", "route"),
    "projections": ("Format)1", "gemm", "multiply", "add_slices", "cutlass", "nvjet"),
    "attention": ("_attend", "attend", "_combine", "score", "select_rows", "_entries", "_keys", "_queries", "_place", "_best_blocks"),
    "boundaries": ("write_and_read", "mix", "balance", "split_terms"),
}
PROFILED_STEPS = 4


def decode(session: Session) -> None:
    """Recorded decode steps, and with drafts verify steps and drafts, by batch."""
    found = session.report.setdefault("decode", {})
    for total in session.sizes.batches:
        if not session.goes_on():
            return
        found[total] = {"step": session.median(session.step(total))}
    for total in session.sizes.batches:
        if not session.drafts or not session.goes_on():
            return
        found[total]["verify"] = session.median(session.step(total, 1 + session.drafts))
        found[total]["draft"] = session.median(session.draft(total))


def eager(session: Session) -> None:
    """Decode steps without recordings, which are gone from then on."""
    found = session.report.setdefault("eager", {})
    session.runner.drop_recordings()
    for total in session.sizes.batches:
        if not session.goes_on():
            return
        found[total] = {"step": session.median(session.step(total))}


def routes(session: Session) -> None:
    """Recorded decode steps with rows on another route, which the parts behind this one keep. On CPUs one that they have."""
    runner, cuda = session.runner, session.options.device == "cuda"
    exchange = runner._exchange
    assert exchange is not None
    runner.drop_recordings()
    exchange.close()
    exchange.route = Route.PEERS if cuda else Route.ALL_TO_ALL
    if cuda:
        text, dtype = runner.model_config.text, exchange._nothing.dtype
        exchange._peers = make_peers(runner.config, text, dtype, "cuda", exchange.group, exchange.exact)
    runner._try_to_record(CudaRecorder() if cuda else NullRecorder())
    session.report["route"] = f"{exchange.route}, {runner.path}"
    found = session.report.setdefault("routes", {})
    for total in session.sizes.batches:
        if not session.goes_on():
            return
        found[total] = {"step": session.median(session.step(total))}


def shares(session: Session) -> None:
    """What kernels take of a decode step on rank 0, by kind, and what is left between them. The profiler slows the host, not kernels."""
    found = session.report.setdefault("shares", {})
    for total in session.sizes.batches:
        if not session.goes_on():
            return
        step = session.step(total)
        if session.rank == 0:
            found[total] = profiled(session, step)
        else:
            for _ in range(PROFILED_STEPS + 1):
                session.timed(step)


def profiled(session: Session, step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds a step: of kernels by kind, of the whole, and of the time in which no kernel runs."""
    cuda = session.options.device == "cuda"
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    session.timed(step)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        for _ in range(PROFILED_STEPS):
            session.timed(step)
    events = [e for e in trace.events() or [] if e.device_type == kind and "Memcpy" not in e.name]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    parts: dict[str, float] = dict.fromkeys((*KERNELS, "other"), 0.0)
    others: dict[str, float] = {}
    for event in events:
        took = (event.time_range.end - event.time_range.start) / 1e3 / PROFILED_STEPS
        part = kind_of(event.name)
        parts[part] += took
        if part == "other":
            others[event.name[:80]] = others.get(event.name[:80], 0.0) + took
    return {"parts": parts, "idle": idle_ms(spans) / PROFILED_STEPS, "whole": (spans[-1][1] - spans[0][0]) / 1e3 / PROFILED_STEPS,
            "others": dict(sorted(others.items(), key=lambda item: -item[1])[:6])}  # fmt: skip


def kind_of(name: str) -> str:
    return next((part for part, words in KERNELS.items() if any(word in name for word in words)), "other")


def idle_ms(spans: list[tuple[float, float]]) -> float:
    """Between the first and the last of intervals in microseconds, the time that none of them covers. Ascending, they may overlap."""
    idle, end = 0.0, spans[0][0]
    for first, last in spans:
        idle += max(0.0, first - end)
        end = max(end, last)
    return idle / 1e3


def prefill(session: Session) -> None:
    """Long prompts: one of every rank, all at once, and one that all ranks compute together."""
    session.report["bf16_tflops"] = bf16_tflops(session)
    found = session.report.setdefault("prefill", {})
    for length in session.sizes.prompts:
        for together in (False, True)[: 1 + (session.ranks > 1)]:
            chunk = session.sizes.joint_chunk if together else session.sizes.own_chunk
            with nullcontext() if together else session.prefilling_alone():
                if not session.goes_on():
                    return
                owner = not together or session.rank == 0
                session.timed(partial(session.prefill, chunk, chunk, owner))
                rounds = 2 if length == min(session.sizes.prompts) else 1
                times = [session.timed(partial(session.prefill, length, chunk, owner)) for _ in range(rounds)]
                found[f"{length} {'together' if together else 'own'}"] = min(times)


def bf16_tflops(session: Session) -> float:
    """The ceiling of this process's device: one product of square matrices, random numbers."""
    size, calls = (8_192, 12) if session.options.device == "cuda" else (256, 4)
    a, b = (torch.randn(size, size, device=session.options.device).bfloat16() for _ in range(2))
    for _ in range(3):
        a @ b

    def many() -> None:
        for _ in range(calls):
            a @ b

    return 2 * size**3 * calls / min(session.timed(many) for _ in range(3)) / 1e9
