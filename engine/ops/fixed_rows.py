"""How batch-invariant mode calls libraries, whose order of a sum follows the shape of the call and not the row.

Products are made in calls of one number of rows, sums of a GPU too. Elementwise functions of a CPU treat what is left behind whole
vectors by other code: rows are filled up, so that nothing is left. What an op's own kernels need for it, they say themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# Rows of a product. CPU: the fewest that libraries multiply by their blocked kernels. GPU: one tile of theirs.
_ROWS = {"cpu": 16, "cuda": 128}
# Calls of so many times as many rows are quicker, and taken where they proved to give the same bits.
_MANY = 16
# Rows whose elements are whole vectors, whatever the width: twice the 16 numbers of the widest registers.
_WHOLE = 32


def fixed_linear(x: Tensor, weight: Tensor, out: Tensor | None = None, wide: bool = False) -> Tensor:
    """x [T, C] times weight [A, C] transposed, in calls of one shape; rows that the last one lacks are zeros.

    wide: fp32 results of bf16 numbers. out: [T, A] to write to.
    """
    rows, matrix = x.contiguous(), weight.t()
    count, least = len(rows), _ROWS[x.device.type]
    dtype = torch.float32 if wide else x.dtype
    out = torch.empty(count, len(weight), dtype=dtype, device=x.device) if out is None else out
    begin = 0
    for size in (least * _MANY, least):
        if count - begin >= size and (size == least or _agree(weight, wide)):
            while count - begin >= size:
                _multiply(rows[begin : begin + size], matrix, out[begin : begin + size], wide)
                begin += size
    if begin < count:
        rest = rows.new_zeros(least, rows.shape[1])
        rest[: count - begin] = rows[begin:]
        whole = torch.empty(least, len(weight), dtype=dtype, device=x.device)
        _multiply(rest, matrix, whole, wide)
        out[begin:] = whole[: count - begin]
    return out


def _multiply(x: Tensor, matrix: Tensor, out: Tensor, wide: bool) -> None:
    if wide and x.dtype is not torch.float32:
        torch.mm(x, matrix, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x, matrix, out=out)


def _agree(weight: Tensor, wide: bool) -> bool:
    """Whether a call of many rows gives random rows the bits of calls of few: their sums have one order or differ all over. Found out once
    for each shape, and not while a step is recorded, when nothing can be compared.
    """
    key = (weight.shape, weight.dtype, wide, weight.device)
    if key not in _agreed and not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        least = _ROWS[weight.device.type]
        x = torch.randn(least * _MANY, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
        many = torch.empty(len(x), len(weight), dtype=torch.float32 if wide else x.dtype, device=x.device)
        few = torch.empty_like(many)
        _multiply(x, weight.t(), many, wide)
        for begin in range(0, len(x), least):
            _multiply(x[begin : begin + least], weight.t(), few[begin : begin + least], wide)
        _agreed[key] = torch.equal(many, few)
    return _agreed.get(key, False)


# Shape, dtype, fp32 results, device -> what `_agree` found: facts about the libraries of this process.
_agreed: dict[tuple[torch.Size, torch.dtype, bool, torch.device], bool] = {}


def in_one_shape(run: Callable[..., Any], *rows: Tensor) -> Any:
    """run(*rows) over rows [T, ...]: on a GPU in groups of one size, whose kernels follow the shape of a call; on a CPU filled up to whole
    vectors, whose functions go by elements and by rows.
    """
    if rows[0].device.type != "cpu":
        return in_groups(run, *rows)
    count = len(rows[0])
    missing = -count % _WHOLE
    if not missing or not count:
        return run(*rows)
    result = run(*(torch.cat((part, part[-1:].expand(missing, *part.shape[1:]))) for part in rows))
    return result[:count] if isinstance(result, Tensor) else tuple(part[:count] for part in result)


def in_groups(run: Callable[..., Any], *rows: Tensor) -> Any:
    """run(*rows) over rows [T, ...] of a GPU in groups of one size, for sums and batched products, whose kernels follow their number.

    A CPU makes them row by row and matrix by matrix.
    """
    count, size = len(rows[0]), _ROWS[rows[0].device.type]
    if not count or rows[0].device.type == "cpu":
        return run(*rows)
    filled = [torch.cat((part, part[-1:].expand(-count % size, *part.shape[1:]))) for part in rows]
    results = [run(*(part[begin : begin + size] for part in filled)) for begin in range(0, count, size)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)[:count]
    return tuple(torch.cat(parts)[:count] for parts in zip(*results, strict=True))


def tiles(index: Tensor, bias: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Columns of index [T, K] and bias [T, 1, K] in tiles of `size`; what the last one lacks points at row 0 and is absent."""
    missing = -index.shape[1] % size
    if missing:
        index, bias = pad(index, (0, missing)), pad(bias, (0, missing), value=float("-inf"))
    return list(zip(index.split(size, 1), bias.split(size, 2), strict=True))
