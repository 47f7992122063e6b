"""Tokens from logits in three launches, survey, weigh and decide, or four with filters."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.ops.cuda.library import Kernels, SampleArguments, check_launch
from engine.ops.cuda.packed_gemm import machine
from engine.ops.sample_rows import Draws

_SPLITS = 16  # as in csrc/include/sample_rows.cuh


def launch(logits: Tensor, draws: Draws, num_ids: int) -> tuple[Tensor, Tensor]:
    """The op `sample_rows` on the current CUDA device."""
    return run_rows(*machine(logits.device), logits, draws, num_ids)


def run_rows(run: Kernels, stream: int, logits: Tensor, draws: Draws, num_ids: int) -> tuple[Tensor, Tensor]:
    """`launch` with the kernels given, which may be the emulated ones."""
    rows, device = logits.shape[0], logits.device
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
    assert logits.stride(1) == 1, f"rows are not contiguous: {logits.stride()}"
    ids, best = torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, device=device)
    wide = torch.empty(2, rows, _SPLITS, dtype=torch.int64, device=device)
    narrow = torch.empty(4, rows, _SPLITS, dtype=torch.int32, device=device)
    temperature, modes, numbers = draws.temperature.contiguous(), draws.modes.contiguous(), draws.numbers.contiguous()
    arguments = SampleArguments(
        logits=logits.data_ptr(),
        temperature=temperature.data_ptr(),
        modes=modes.data_ptr(),
        numbers=numbers.data_ptr(),
        ids=ids.data_ptr(),
        best=best.data_ptr(),
        tops=narrow[0].data_ptr(),
        top_ids=narrow[1].data_ptr(),
        sums=narrow[2].data_ptr(),
        times=wide[0].data_ptr(),
        time_ids=narrow[3].data_ptr(),
        weights=wide[1].data_ptr(),
        row_stride=logits.stride(0),
        num_rows=rows,
        num_ids=num_ids,
    )
    if draws.filters is not None:
        kept = [part.contiguous() for part in (draws.filters.top_p, draws.filters.top_k, draws.filters.min_p)]
        cuts = torch.empty(rows, 2, dtype=torch.int32, device=device)
        arguments.top_p, arguments.top_k, arguments.min_p, arguments.cuts = (part.data_ptr() for part in (*kept, cuts))
    check_launch(run.sample(ctypes.byref(arguments), stream), "sample_rows")
    return ids, best
