"""Kernels of one op that begin while the one before them still ends: programmatic dependent launches of SM90.

The first calls `let_next_begin`, and the next, launched with `launch_pdl`, `wait_for_last` before it reads what the first has written. Both
are no instruction without EARLY. Only kernels of one op do so: what another op launched before them has ended when the first begins.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from engine.ops.triton.interpreter import INTERPRETED


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The next kernel may take the places that programs of this one leave or do not need."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Until the kernel before has ended and everything that it wrote is visible."""
    if EARLY:
        cuda.gdc_wait()


@cache
def can_begin_early(device: torch.device) -> bool:
    """Whether a device launches kernels so."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
