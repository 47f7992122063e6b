"""The fused boundary against its parts."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from engine.ops.hyper_boundary import HYPER_BOUNDARY, Mixer, Written
from engine.ops.hyper_mixes import spread_scale

EPS = 1e-20


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def case(rows, width, n=4):
    h = torch.randn(rows, n, width).bfloat16()
    comb = torch.rand(rows, n, n)
    written = Written(torch.randn(rows, width).bfloat16(), torch.rand(rows, n) * 2, comb / comb.sum(1, keepdim=True))
    mixer = Mixer(
        torch.randn((2 + n) * n, n * width) * 0.02, spread_scale(torch.tensor([1.0, 0.7, 1.3]), n), torch.randn((2 + n) * n), 20, 1e-6
    )
    return h, written, mixer, torch.rand(rows, n), (1 + 0.1 * torch.randn(width)).bfloat16()


@pytest.fixture
def launch(device):
    """The kernels, fed and read on the CPU."""
    from engine.ops.triton.hyper_boundary import launch as run

    def call(*arguments):
        return move(run(*(move(argument, device) for argument in arguments)), "cpu")

    return call


def move(thing, device):
    """Tensors, also those inside dataclasses, to a device."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if dataclasses.is_dataclass(thing):
        return type(thing)(*(move(getattr(thing, field.name), device) for field in dataclasses.fields(thing)))
    return thing


def check(got, want):
    # The interpreter cuts bf16 off where the GPU rounds, and the mixes follow the streams.
    mixes = 2e-3 if os.environ.get("TRITON_INTERPRET") == "1" else 4e-6
    for name, limit in (("h", 8e-3), ("pre", mixes), ("post", mixes), ("comb", mixes), ("x", 2e-2)):
        ours, theirs = getattr(got, name), getattr(want, name)
        if theirs is None:
            assert ours is None
            continue
        assert ours.shape == theirs.shape
        if ours.numel():
            assert (ours.float() - theirs.float()).abs().max() <= limit * theirs.float().abs().max().clamp(min=1e-30), name


@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (3, 200), (18, 96)])
def test_all_parts_at_once(launch, rows, width):
    h, written, mixer, pre, norm = case(rows, width)
    check(launch(h, written, mixer, pre, norm, EPS), HYPER_BOUNDARY.reference(h, written, mixer, pre, norm, EPS))


@pytest.mark.parametrize("terms", [False, True])
def test_a_matrix_split_beforehand_gives_the_same_mixes(device, terms):
    from engine.ops.triton.hyper_boundary import Division
    from engine.ops.triton.hyper_boundary import launch as run

    arguments = case(11, 96)
    got = run(*(move(part, device) for part in arguments), EPS, Division(16, 32, 4, 64, terms))
    check(move(got, "cpu"), HYPER_BOUNDARY.reference(*arguments, EPS))


def test_first_and_last_boundaries(launch):
    h, written, mixer, pre, norm = case(5, 128)
    check(launch(h, None, mixer, pre, norm, EPS), HYPER_BOUNDARY.reference(h, None, mixer, pre, norm, EPS))
    check(launch(h, written, None, pre, norm, EPS), HYPER_BOUNDARY.reference(h, written, None, pre, norm, EPS))


def test_zero_streams_stay_zero_and_rows_are_independent(launch):
    h, _, mixer, pre, norm = case(6, 128)
    h[2] = 0
    h[4] = float("nan")
    got = launch(h, None, mixer, pre, norm, EPS)
    assert (got.x[2] == 0).all()
    assert got.comb[2].isfinite().all()
    assert got.x[4].isnan().all()
    alone = launch(h[3:4], None, mixer, pre[3:4], norm, EPS)
    for name in ("x", "pre", "post", "comb"):
        assert torch.equal(getattr(got, name)[3], getattr(alone, name)[0])


def test_another_number_of_streams_falls_back_aloud(launch, caplog):
    h, written, mixer, pre, norm = case(2, 64, n=2)
    check(launch(h, written, mixer, pre, norm, EPS), HYPER_BOUNDARY.reference(h, written, mixer, pre, norm, EPS))
    assert "hyper_boundary falls back to its reference: 2 streams" in caplog.text
