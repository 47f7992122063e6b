"""Kernels of others for the same op, where their packages are installed. A peer that cannot run is left out, and its reason is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deepinfer_cli.opbench.case import Call

log = logging.getLogger(__name__)

# Source: the kernel's cache format of 64 tokens a page: 448 e4m3 numbers, 64 of bf16, 8 bytes of scales.
_FLASH_MLA_ROW, _FLASH_MLA_PAGE = 584, 64


def optional_peer(name: str, make: Callable[[], Sequence[Call]]) -> dict[str, Sequence[Call]]:
    """{name: calls}, or nothing where they cannot be made or the first one fails: another package's kernel must not end a case of ours."""
    try:
        calls = make()
        calls[0]()
        torch.cuda.synchronize()
    except Exception as error:
        log.warning("peer %s is left out: %s: %s", name, type(error).__name__, str(error).splitlines()[0][:160])
        return {}
    return {name: calls}


def flash_mla(queries: Sequence[Tensor], num_keys: int, scale: float) -> dict[str, Sequence[Call]]:
    """Sparse decode attention of sgl-flash-mla on SM90 over its 584-byte rows, which keep 64 channels in bf16; twice the bytes of ours.

    queries: [T, 64, 512] bf16, one set per call. num_keys: of each row, all from one source.
    """
    return optional_peer("sgl-flash-mla, 584-byte rows", partial(_flash_mla, queries, num_keys, scale))


def _flash_mla(queries: Sequence[Tensor], num_keys: int, scale: float) -> list[Call]:
    package: Any = import_module("flash_mla")
    rows, device = len(queries[0]), queries[0].device
    pages = -(-rows * num_keys // _FLASH_MLA_PAGE)
    # Random bytes without the exponents of infinite or huge numbers.
    cache = torch.randint(0, 64, (pages, _FLASH_MLA_PAGE, 1, _FLASH_MLA_ROW), dtype=torch.uint8, device=device)
    index = torch.randperm(rows * num_keys, device=device).view(rows, 1, num_keys).int()
    sink = torch.zeros(queries[0].shape[1], device=device)
    meta = package.get_mla_metadata()[0]

    def call(q: Tensor) -> Tensor:
        out: Tensor = package.flash_mla_with_kvcache(
            q[:, None], cache, None, None, 512, meta, None, scale, False, True, index, sink, use_legacy=True
        )[0]
        return out

    return [partial(call, q) for q in queries]
