"""Tokens in the order of products by warpgroups: one kernel and the definition."""

import pytest
import torch

from engine.ops.cuda.packed_gemm import in_order_of_products
from engine.ops.packed_weights import Format


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize(
    ("rows", "columns", "groups", "slices"), [(0, 256, 1, 1), (1, 256, 1, 1), (3, 2560, 2, 4), (2, 8704, 1, 1), (2, 4608, 1, 8)]
)
def test_kernel_orders_columns_as_defined(device, format, rows, columns, groups, slices):
    from engine.ops.triton.product_order import in_order

    x = torch.randint(-(2**15), 2**15, (rows, columns + 64), dtype=torch.int16, device=device).view(torch.bfloat16)[:, :columns]
    got = in_order(x, format, groups, slices)
    assert got.is_contiguous()
    assert torch.equal(got.view(torch.int16), in_order_of_products(x, format, groups, slices).view(torch.int16))
