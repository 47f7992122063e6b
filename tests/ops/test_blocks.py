"""Norm, rotation, streams, pooling and experts against explicit loops."""

import pytest
import torch
from torch.nn.functional import silu, softplus

from engine.ops.expert_logits import expert_logits
from engine.ops.expert_mlp import expert_mlp
from engine.ops.hyper_mixes import hyper_mixes, sinkhorn, sinkhorn_tensors, spread_scale
from engine.ops.hyper_streams import collapse, expand
from engine.ops.pool_pairs import pool_pairs
from engine.ops.rms_norm import rms_norm
from engine.ops.rope import plain_frequencies, rotate_, rotation, yarn_frequencies
from engine.ops.route_experts import route_experts


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_rms_norm_scales_rows_and_keeps_zero_rows():
    x, w = torch.randn(3, 64), torch.randn(64)
    x[1] = 0
    want = x * (x.double().square().mean(1, keepdim=True) + 1e-20).rsqrt() * w
    assert (rms_norm(x, w, 1e-20) - want).abs().max() <= 1e-6
    assert (rms_norm(x, w, 1e-20)[1] == 0).all()
    assert rms_norm(x[:0], w, 1e-20).shape == (0, 64)
    with pytest.raises(ValueError, match=r"rms_norm: .* x \[3, 64\] float32, weight \[32\]"):
        rms_norm(x, w[:32], 1e-20)


def test_yarn_table_has_the_documented_values():
    table = yarn_frequencies(64, 160000.0, 16, 32, 1, 65536)
    want = {15: 3.6355385e-3, 16: 2.265625e-3, 20: 2.9697778e-4, 31: 5.680529e-7}
    for i, value in want.items():
        assert table[i].item() == pytest.approx(value, rel=1e-6)
    assert torch.equal(table[:16], plain_frequencies(64, 160000.0)[:16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_interleaved_pairs_of_the_last_dims(dtype):
    rot = rotation(torch.tensor([0, 3]), torch.tensor([0.5, 0.25]))
    x = torch.randn(2, 3, 8).to(dtype)
    y = rotate_(x.clone(), rot)
    assert torch.equal(y[..., :4], x[..., :4])
    assert torch.equal(y[0], x[0])
    for pair, angle in ((0, 1.5), (1, 0.75)):
        a, b = x[1, :, 4 + 2 * pair].float(), x[1, :, 5 + 2 * pair].float()
        cos, sin = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
        assert torch.allclose(y[1, :, 4 + 2 * pair].float(), a * cos - b * sin, atol=1e-6 if dtype == torch.float32 else 0.02)
        assert torch.allclose(y[1, :, 5 + 2 * pair].float(), a * sin + b * cos, atol=1e-6 if dtype == torch.float32 else 0.02)


def test_inverse_rotation_undoes_it():
    rot = rotation(torch.arange(5) * 1000, plain_frequencies(16, 10000.0))
    x = torch.randn(5, 32)
    assert (rotate_(rotate_(x.clone(), rot), rot.conj_physical()) - x).abs().max() <= 1e-6


def test_zero_mixes_give_the_documented_weights():
    pre, post, comb = hyper_mixes(torch.zeros(6, 24), torch.ones(24), torch.zeros(24), 20, 1e-6)
    assert torch.allclose(pre, torch.full((6, 4), 0.5 + 1e-6))
    assert torch.allclose(post, torch.ones(6, 4))
    assert torch.allclose(comb, torch.full((6, 4, 4), 0.25), atol=1e-5)


def explicit_sinkhorn(a, iters, eps):
    a = a.double()
    a = a / (a.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        a = a / (a.sum(2, keepdim=True) + eps)
        a = a / (a.sum(1, keepdim=True) + eps)
    return a


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 40])
def test_sinkhorn_follows_the_step_by_step_definition(rows):
    a = (torch.randn(rows, 4, 4) * 3).softmax(-1) + 1e-6
    want = explicit_sinkhorn(a, 20, 1e-6)
    for ours in (sinkhorn(a, 20, 1e-6), sinkhorn_tensors(a, 20, 1e-6)):
        assert ours.shape == want.shape
        assert ours.numel() == 0 or (ours - want).abs().max() <= 1e-6


def test_mixed_streams_keep_their_sums():
    _, _, comb = hyper_mixes(torch.randn(50, 24), spread_scale(torch.tensor([1.0, 0.5, 1.2]), 4), torch.randn(24), 20, 1e-6)
    assert (comb.sum(1) - 1).abs().max() <= 1e-4
    assert (comb.sum(2) - 1).abs().max() <= 1e-2


def test_streams_are_read_and_written_as_an_explicit_loop_says():
    y, h = torch.randn(3, 8), torch.randn(3, 4, 8)
    pre, post, comb = torch.rand(3, 4), torch.rand(3, 4), torch.rand(3, 4, 4)
    read, written = collapse(h, pre), expand(y, h, post, comb)
    for t in range(3):
        assert torch.allclose(read[t], sum(pre[t, i] * h[t, i] for i in range(4)), atol=1e-6)
        for k in range(4):
            want = post[t, k] * y[t] + sum(comb[t, j, k] * h[t, j] for j in range(4))
            assert torch.allclose(written[t, k], want, atol=1e-5)


def test_comb_carries_its_first_index_into_its_second():
    comb = torch.zeros(1, 4, 4)
    comb[0, 1, 3] = 1
    h = torch.randn(1, 4, 8)
    out = expand(torch.zeros(1, 8), h, torch.zeros(1, 4), comb)
    assert torch.equal(out[0, 3], h[0, 1])
    assert (out[0, :3] == 0).all()


def test_pooling_is_a_softmax_over_two_tokens():
    a, b = torch.randn(5, 16), torch.randn(5, 16) * 4
    gate = torch.stack((a[:, 8:], b[:, 8:])).softmax(0)
    assert torch.allclose(pool_pairs(a, b), gate[0] * a[:, :8] + gate[1] * b[:, :8], atol=1e-6)
    assert pool_pairs(a[:0], b[:0]).shape == (0, 8)


def test_router_selects_by_biased_and_weighs_by_unbiased_scores():
    logits, bias = torch.randn(9, 6), torch.randn(6)
    ids, weights = route_experts(logits, bias, 2, 1.5)
    scores = softplus(logits).sqrt()
    for t in range(9):
        want = (scores[t] + bias).topk(2).indices
        assert set(ids[t].tolist()) == set(want.tolist())
        assert torch.allclose(weights[t], scores[t][ids[t]] / scores[t][ids[t]].sum() * 1.5)


def test_router_ties_go_to_the_lower_expert():
    ids, _ = route_experts(torch.zeros(1, 8), torch.tensor([0, 1, 1, 0, 1, 0, 0, 0.0]), 2, 1.0)
    assert ids[0].tolist() == [1, 2]


def test_gate_temperature_divides_the_logits():
    x, gate = torch.randn(2, 4), torch.randn(3, 4)
    assert torch.allclose(expert_logits(x, gate, 2.0), x @ gate.t() / 2)


def explicit_experts(x, ids, weights, w13, w2, limit):
    out = torch.zeros_like(x)
    inner = w2.shape[2]
    for t in range(len(x)):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            g = (w13[e, :inner] @ x[t]).clamp(max=limit)
            u = (w13[e, inner:] @ x[t]).clamp(-limit, limit)
            out[t] += w2[e] @ (silu(g) * u * weight)
    return out


@pytest.mark.parametrize("tokens", [1, 2, 30, 90])
def test_grouped_experts_equal_a_loop_over_tokens(tokens):
    x, ids, weights = torch.randn(tokens, 16), torch.rand(tokens, 5).argsort(1)[:, :2], torch.rand(tokens, 2)
    w13, w2 = torch.randn(5, 24, 16), torch.randn(5, 16, 12)
    got = expert_mlp(x, ids, weights, w13, w2, 2.0, False)
    assert (got - explicit_experts(x, ids, weights, w13, w2, 2.0)).abs().max() <= 1e-4


def test_gate_is_clamped_from_above_only_and_up_on_both_sides():
    w13, w2 = torch.tensor([[[1.0, 0], [0, 1.0]]]), torch.tensor([[[1.0], [0.0]]])

    def run(gate, up):
        return expert_mlp(torch.tensor([[gate, up]]), torch.tensor([[0]]), torch.ones(1, 1), w13, w2, 2.0, False)[0, 0]

    assert run(5.0, 9.0) == silu(torch.tensor(2.0)) * 2
    assert run(-5.0, -9.0) == silu(torch.tensor(-5.0)) * -2


def test_no_tokens_are_fine():
    got = expert_mlp(
        torch.zeros(0, 16), torch.zeros(0, 2).long(), torch.zeros(0, 2), torch.zeros(3, 8, 16), torch.zeros(3, 16, 4), 2.0, False
    )
    assert got.shape == (0, 16)
