"""Tokens from logits that are read once: as a stream, or kept by a cluster of thread blocks in its shared memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.ops.cuda.device import has_clusters, shared_bytes
from engine.ops.cuda.library import Kernels, SampleArguments, check_launch
from engine.ops.cuda.packed_gemm import machine
from engine.ops.sample_rows import SAMPLE_ROWS, Draws, Mode
from engine.ops.triton.fallback import warn_once

# Threads of a block: of a stream; of a row that is kept, of which three blocks fit a multiprocessor at 129,280 ids; two fit with filters.
_STREAM_THREADS, _THREADS, _FILTER_THREADS = 128, 256, 512
MOST_IDS = 8 * 46 * 1024  # eight blocks of a cluster, 184 KiB of logits each beside the histograms of filters
_HISTOGRAMS = 40 * 1024  # bytes of a block for filters, at most


def launch(logits: Tensor, draws: Draws, num_ids: int) -> tuple[Tensor, Tensor]:
    """The op `sample_rows` on the current CUDA device; the reference where a row does not fit a cluster, or there are none."""
    most = most_ids(logits.device)
    if num_ids > most:
        warn_once("sample_rows", f"{num_ids} ids, of which clusters of this device hold {most}")
        result: tuple[Tensor, Tensor] = SAMPLE_ROWS.reference(logits, draws, num_ids)
        return result
    return run_rows(*machine(logits.device), logits, draws, num_ids)


def most_ids(device: torch.device) -> int:
    """Ids of the longest row that fits a cluster, with filters; 0 without clusters."""
    return min(MOST_IDS, 8 * (shared_bytes(device) - _HISTOGRAMS) // 4) if has_clusters(device) else 0


def run_rows(run: Kernels, stream: int, logits: Tensor, draws: Draws, num_ids: int, threads: int = 0) -> tuple[Tensor, Tensor]:
    """`launch` with the kernels given, which may be the emulated ones. threads: of a block, 128, 256 or 512; 0 for the best."""
    rows, device = logits.shape[0], logits.device
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
    assert logits.stride(1) == 1, f"rows are not contiguous: {logits.stride()}"
    ids, best = torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, device=device)
    temperature, modes, numbers = draws.temperature.contiguous(), draws.modes.contiguous(), draws.numbers.contiguous()
    kinds = frozenset(Mode) if draws.kinds is None else draws.kinds
    has_streams = bool(kinds & {Mode.GREEDY, Mode.RACE})
    has_others = Mode.INVERSE in kinds or (draws.filters is not None and Mode.RACE in kinds)
    arguments = SampleArguments(
        logits=logits.data_ptr(),
        temperature=temperature.data_ptr(),
        modes=modes.data_ptr(),
        numbers=numbers.data_ptr(),
        ids=ids.data_ptr(),
        best=best.data_ptr(),
        row_stride=logits.stride(0),
        num_rows=rows,
        num_ids=num_ids,
        streams=(threads or _STREAM_THREADS) if has_streams else 0,
        draws=(threads or (_THREADS if draws.filters is None else _FILTER_THREADS)) if has_others else 0,
    )
    if draws.filters is not None:
        kept = [part.contiguous() for part in (draws.filters.top_p, draws.filters.top_k, draws.filters.min_p)]
        arguments.top_p, arguments.top_k, arguments.min_p = (part.data_ptr() for part in kept)
    check_launch(run.sample(ctypes.byref(arguments), stream), "sample_rows")
    return ids, best
