import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.ops.sparse_attention as module
from engine.ops.candidate_blocks import candidate_blocks
from engine.ops.index_scores import index_scores
from engine.ops.select_topk import select_topk
from engine.ops.sparse_attention import Selection, sparse_attention


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def explicit_attention(q, sources, sink, scale):
    out = torch.zeros_like(q)
    for t in range(q.shape[0]):
        keys = torch.cat([rows[index[t][index[t] >= 0]] for rows, index in sources])
        for h in range(q.shape[1]):
            weight = (keys @ q[t, h] * scale).exp()
            out[t, h] = (weight[:, None] * keys).sum(0) / (weight.sum() + sink[h].exp())
    return out


def test_attention_follows_the_explicit_sum_over_both_sources():
    q, sink = torch.randn(5, 3, 16), torch.randn(3)
    rows = [torch.randn(20, 16), torch.randn(9, 16)]
    index = [torch.randint(-1, 20, (5, 7)), torch.randint(-1, 9, (5, 4))]
    got = sparse_attention(q, [(r, Selection.of(i)) for r, i in zip(rows, index, strict=True)], sink, 0.25)
    assert (got - explicit_attention(q, list(zip(rows, index, strict=True)), sink, 0.25)).abs().max() <= 1e-5


def test_row_without_keys_is_zero():
    got = sparse_attention(torch.randn(2, 3, 8), [(torch.randn(4, 8), Selection.of(torch.full((2, 5), -1)))], torch.randn(3), 1.0)
    assert (got == 0).all()
    assert sparse_attention(
        torch.randn(0, 3, 8), [(torch.randn(4, 8), Selection.of(torch.zeros(0, 5).long()))], torch.randn(3), 1.0
    ).shape == (0, 3, 8)


def test_key_in_both_sources_counts_twice():
    q, rows, sink = torch.randn(1, 1, 8), torch.randn(3, 8), torch.full((1,), -50.0)
    twice = sparse_attention(q, [(rows, Selection.of(torch.tensor([[0, 1]]))), (rows, Selection.of(torch.tensor([[0]])))], sink, 1.0)
    again = sparse_attention(q, [(rows, Selection.of(torch.tensor([[0, 1, 0]])))], sink, 1.0)
    once = sparse_attention(q, [(rows, Selection.of(torch.tensor([[0, 1]])))], sink, 1.0)
    assert torch.allclose(twice, again, atol=1e-6)
    assert not torch.allclose(twice, once, atol=1e-3)


def test_chunks_of_queries_do_not_change_the_result(monkeypatch):
    q, rows, index = torch.randn(33, 2, 8), torch.randn(50, 8), torch.randint(-1, 50, (33, 12))
    whole = sparse_attention(q, [(rows, Selection.of(index))], torch.zeros(2), 0.5)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * 12 * 8 * 4)
    assert torch.allclose(sparse_attention(q, [(rows, Selection.of(index))], torch.zeros(2), 0.5), whole, atol=1e-6)


def test_scores_sum_weighted_positive_matches_and_hide_the_future():
    q, w, keys = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4), torch.randn(2, 10, 8)
    count = torch.tensor([[0, 3, 10], [1, 9, 2]])
    got = index_scores(q, w, keys, count)
    for b in range(2):
        for r in range(3):
            n = int(count[b, r])
            want = (w[b, r, :, None] * (q[b, r] @ keys[b].t()).relu()).sum(0)
            assert torch.allclose(got[b, r, :n], want[:n], atol=1e-5)
            assert (got[b, r, n:] == float("-inf")).all()
    assert (got[got > float("-inf")] < 0).any()


def test_invisible_keys_may_hold_nan():
    keys = torch.randn(1, 6, 8)
    keys[0, 4:] = float("nan")
    got = index_scores(torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2), keys, torch.tensor([[4]]))
    assert got[0, 0, :4].isfinite().all()
    assert (got[0, 0, 4:] == float("-inf")).all()


SCORES = st.lists(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, float("-inf")]), min_size=7, max_size=7), min_size=1, max_size=5)


@settings(deadline=None, max_examples=100)
@given(SCORES, st.integers(1, 9))
def test_topk_prefers_lower_indices_and_drops_minus_infinity(scores, k):
    got = select_topk(torch.tensor(scores), k)
    assert got.shape == (len(scores), min(k, 7))
    for row, picks in zip(scores, got.tolist(), strict=True):
        ranked = sorted((i for i in range(7) if row[i] > float("-inf")), key=lambda i: (-row[i], i))
        assert sorted(p for p in picks if p >= 0) == sorted(ranked[:k])


@settings(deadline=None, max_examples=100)
@given(SCORES, st.integers(1, 4), st.integers(1, 4), st.integers(0, 7))
def test_candidate_blocks_keep_the_best_and_the_newest(scores, kept, size, count):
    table = torch.tensor(scores)
    table[:, count:] = float("-inf")
    table[:, :count] = table[:, :count].clamp(min=-5)
    got = candidate_blocks(table, torch.full((len(scores),), count), kept, size)
    assert got.shape == (len(scores), -(-7 // size))
    for row, mask in zip(table.tolist(), got.tolist(), strict=True):
        best = [max(row[b * size : (b + 1) * size]) for b in range(len(mask))]
        if count:
            best[(count - 1) // size] = float("inf")
        ranked = sorted((b for b in range(len(mask)) if best[b] > float("-inf")), key=lambda b: (-best[b], b))
        assert [b for b, keep in enumerate(mask) if keep] == sorted(ranked[:kept])
