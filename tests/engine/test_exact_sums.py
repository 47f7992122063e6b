"""Products whose sums do not depend on their order."""

import torch

from engine.exact_sums import ExactSums


def test_products_are_rounded_once_from_exact_sums():
    torch.manual_seed(0)
    a, b = torch.randn(3, 5, 400), torch.randn(3, 400, 6)
    bias, out = torch.randn(3, 5, 6), torch.empty(5, 6)
    with ExactSums():
        got = [torch.bmm(a, b), torch.baddbmm(bias, a, b, alpha=0.5), torch.nn.functional.linear(a[0], b[0].t()), a[0] @ b[0]]
        torch.mm(a[0], b[0], out=out)
    exact = torch.bmm(a.double(), b.double())
    assert torch.equal(got[0], exact.float())
    assert torch.equal(got[1], (bias.double() + 0.5 * exact).float())
    assert all(torch.equal(product, exact[0].float()) for product in (*got[2:], out))


def test_order_of_the_terms_does_not_matter():
    torch.manual_seed(1)
    a, b, order = torch.randn(4, 5000), torch.randn(5000, 4), torch.randperm(5000)
    plain = torch.equal(a @ b, a[:, order] @ b[order])
    with ExactSums():
        assert torch.equal(a @ b, a[:, order] @ b[order])
    assert not plain


def test_other_dtypes_and_operations_are_left_alone():
    a = torch.randn(4, 8).bfloat16()
    with ExactSums():
        assert torch.equal(a @ a.t(), torch.matmul(a, a.t()))
        assert (torch.ones(3) + 1).dtype is torch.float32
