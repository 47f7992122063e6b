"""Experts of which other ranks hold some: the shares of two ranks, lane by lane on a CPU, add up to the layer with all experts."""

import pytest
import torch

from engine.ops.cuda import packed_experts
from engine.ops.cuda.packed_experts import run_experts
from engine.ops.cuda.packed_gemm import ExpertLists, expert_sum
from engine.ops.cuda.routed_experts import run_share, run_shared
from engine.ops.packed_experts import PACKED_EXPERTS, PackedExperts
from engine.ops.packed_weights import PackedWeights
from engine.ops.routed_experts import ROUTED_EXPERTS, SHARED_EXPERT
from tests.csrc.emulated import emulated_kernels
from tests.csrc.test_packed_gemm import close
from tests.ops.random_experts import random_experts

NUM, INNER, HIDDEN = 4, 32, 64


@pytest.fixture(scope="module")
def run():
    return emulated_kernels()


def share(whole: PackedExperts, first: int, count: int) -> PackedExperts:
    def cut(part: PackedWeights) -> PackedWeights:
        return PackedWeights(part.format, part.codes[first : first + count], part.scales[first : first + count], part.rows, part.columns)

    return PackedExperts(cut(whole.w13), cut(whole.w2), whole.shared_w13, whole.shared_w2)


def local(ids, first, count):
    return torch.where((ids >= first) & (ids < first + count), ids - first, -1)


def setting():
    torch.manual_seed(1)
    whole = random_experts(NUM, INNER, HIDDEN)
    ids = torch.stack([torch.randperm(NUM)[:2] for _ in range(5)])
    return whole, torch.randn(5, HIDDEN).bfloat16(), ids, torch.rand(5, 2)


def test_the_shares_of_two_ranks_add_up(run):
    whole, x, ids, weights = setting()
    halves = [run_share(run, 0, x, local(ids, first, 2), weights, share(whole, first, 2), 10.0, False, True, 2) for first in (0, 2)]
    total = sum(half.float() for half in halves) + run_shared(run, 0, x, whole, 10.0, False).float()
    close(total.bfloat16(), PACKED_EXPERTS.reference(x, ids, weights, whole, 10.0, False), 2e-2)
    close(total.bfloat16(), run_experts(run, 0, x, ids, weights, whole, 10.0, False), 2e-2)


@pytest.mark.parametrize("summed", [True, False])
def test_a_share_equals_its_plain_definition(run, summed):
    whole, x, ids, weights = setting()
    part, mine = share(whole, 2, 2), local(ids, 2, 2)
    got = run_share(run, 0, x, mine, weights, part, 10.0, False, summed, 2)
    close(got, ROUTED_EXPERTS.reference(x, mine, weights, part, 10.0, False, summed, 2), 2e-2)
    if not summed:
        assert (got[mine < 0] == 0).all()


def test_a_row_without_a_choice_gets_zeros(run):
    whole, x, ids, weights = setting()
    got = run_share(run, 0, x, torch.full_like(ids, -1), weights, share(whole, 0, 2), 10.0, False, True, 2)
    assert (got == 0).all()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_choices_without_an_expert_are_no_work_items_however_few_rows_there_are(run, monkeypatch, ranks, tokens):
    """An item of expert -1 would read in front of the weights, which a device ends with an illegal access."""
    whole, x, ids, weights = setting()
    launched = []

    def routed(*args, **kwargs):
        launched.append(args[4])
        return launch(*args, **kwargs)

    launch = packed_experts.routed
    monkeypatch.setattr(packed_experts, "routed", routed)
    mine = ids[:tokens].clone()
    mine[0] = -1
    got = run_share(run, 0, x[:tokens], mine, weights[:tokens], whole, 10.0, False, True, ranks)
    close(got, ROUTED_EXPERTS.reference(x[:tokens], mine, weights[:tokens], whole, 10.0, False, True, ranks), 2e-2)
    assert all(isinstance(lists, ExpertLists) for lists in launched)
    assert len(launched) == 2


def test_choices_of_other_ranks_are_not_read(run):
    parts, ids = torch.randn(3, 2, 20), torch.tensor([[0, -1], [-1, -1], [1, 1]])
    parts[ids < 0] = float("nan")
    out = torch.full((3, 20), float("nan"), dtype=torch.bfloat16)
    expert_sum(run, 0, parts, None, out, ids)
    assert torch.equal(out, torch.stack([parts[0, 0], torch.zeros(20), parts[2, 0] + parts[2, 1]]).bfloat16())


def test_the_shared_expert_alone(run):
    whole, x, _, _ = setting()
    close(run_shared(run, 0, x, whole, 10.0, False), SHARED_EXPERT.reference(x, whole, 10.0, False), 1e-2)
