"""Products of many rows in the order of the packed products."""

import pytest
import torch

from engine.ops.cuda.packed_gemm import in_order_of_products
from engine.ops.packed_weights import Format


@pytest.mark.parametrize(
    ("rows", "groups", "outputs", "blocks", "slices"), [(0, 1, 16, 4, 4), (3, 2, 40, 5, 4), (70, 1, 130, 9, 8), (5, 3, 64, 2, 1)]
)
def test_slices_together_and_apart_give_the_product(device, rows, groups, outputs, blocks, slices):
    from engine.ops.triton.ordered_linear import Division, ordered_linear

    torch.manual_seed(0)
    columns = blocks * 128
    x = torch.randn(rows, groups * columns, device=device).bfloat16()
    weight = torch.randn(groups, outputs, columns, device=device).bfloat16() * columns**-0.5
    wanted = torch.einsum("tgc,gac->tga", x.double().unflatten(1, (groups, columns)), weight.double()).flatten(1)
    ordered = in_order_of_products(weight.flatten(0, 1), Format.FP8, 1, slices).view_as(weight)
    some = in_order_of_products(x, Format.FP8, groups, slices)
    for divided in (Division(64, 128), Division(64, 64, 64, True)):
        got = ordered_linear(some, ordered, slices, 128, divided)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)
