import math
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.distribution import filter_candidates, filter_sorted, probabilities
from engine.draws import FIXED_ONE, fixed_point
from engine.errors import RequestError
from engine.logit_edits import LogitEdits
from engine.logprobs import LOGPROB_FLOOR
from engine.ops.sample_rows import SAMPLE_ROWS
from engine.request import Request, SamplingParams, Sequence
from engine.sampler import Sampler, draw, row_draws

_ids = count()
EOS = frozenset([1])


def row(seed: int = 0, prompt=(3, 4, 5), output=(), **params) -> Sequence:
    number = next(_ids)
    request = Request(f"r{number}", list(prompt), SamplingParams(**{"max_tokens": 100, **params}))
    return Sequence(number, request, 0.0, seed, [*prompt, *output], len(prompt), len(prompt))


def sampler(num_tokens: int = 10**6) -> Sampler:
    return Sampler(num_tokens, EOS)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def many_draws(logits: torch.Tensor, num: int, **params) -> np.ndarray:
    """Counts of tokens over `num` draws of one distribution, each with its own seed."""
    tokens = draw(logits.expand(num, -1), [row(seed, **params) for seed in range(num)])
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1])


def kept(logits: list[float], **params) -> list[int]:
    """Ids that survive the filters."""
    return probabilities(torch.tensor([logits]), [SamplingParams(**params)])[0].nonzero()[:, 0].tolist()


# ---- greedy


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert sampler()(logits, [row(temperature=0), row(temperature=0)]).token_ids == [[1], [0]]


def test_a_temperature_whose_quotient_would_overflow_is_greedy():
    logits = torch.tensor([[3.0, 2.0, 5.0, 4.0]])
    for temperature in (1e-40, 5e-324, 1e-31):
        assert sampler()(logits, [row(temperature=temperature, seed=1)]).token_ids == [[2]]
        assert SamplingParams(temperature=temperature).temperature == 0.0


def test_greedy_is_exact_where_a_tiny_temperature_would_not_be():
    logits = torch.zeros(1, 8)
    logits[0, 6] = 1e-7
    assert sampler()(logits, [row(temperature=0)]).token_ids == [[6]]


def test_the_fast_path_equals_the_general_one():
    logits = random_logits(16, 50)
    rows = [row(temperature=0) for _ in range(16)]
    fast = sampler()(logits.clone(), rows).token_ids
    mixed = sampler()(torch.cat([logits, logits[:1]]), [*rows, row(temperature=1.0)]).token_ids
    assert fast == mixed[:16]


def test_ids_without_a_token_are_never_chosen():
    logits = torch.zeros(2, 10)
    logits[:, 8] = 50.0
    result = sampler(num_tokens=8)(logits, [row(temperature=0), row(temperature=1.0, top_logprobs=10)])
    assert all(tokens[0] < 8 for tokens in result.token_ids)
    assert all(value == LOGPROB_FLOOR for token, value in result.logprobs[1][0].top if token >= 8)


# ---- distribution


@pytest.mark.parametrize(("vocab", "temperature"), [(8, 1.0), (8, 0.5), (100, 2.0), (1000, 1.0)])
def test_draws_follow_the_tempered_softmax(vocab: int, temperature: float):
    logits = random_logits(1, vocab, seed=vocab, scale=1.5)
    num = 20_000
    counts = many_draws(logits, num, temperature=temperature)
    expected = torch.softmax(logits[0].double() / temperature, -1).numpy() * num
    assert _chi_square_fits(counts, expected)


def test_draws_follow_the_softmax_of_the_full_vocabulary():
    vocab, num = 129_280, 400
    logits = torch.zeros(1, vocab)
    logits[0, ::1000] = 8.0
    tokens = torch.cat([draw(logits.expand(50, -1), [row(seed) for seed in range(first, first + 50)]) for first in range(0, num, 50)])
    peaks = (tokens % 1000 == 0).sum().item()
    share = 130 * math.exp(8) / (130 * math.exp(8) + vocab - 130)
    assert abs(peaks - num * share) < 3.3 * math.sqrt(num * share * (1 - share))


def test_filtered_draws_follow_the_renormalised_rest():
    logits = random_logits(1, 30, seed=3)
    num = 20_000
    counts = many_draws(logits, num, top_k=5)
    top = logits[0].topk(5)
    expected = np.zeros(30)
    expected[top.indices.numpy()] = torch.softmax(top.values.double(), -1).numpy() * num
    assert _chi_square_fits(counts, expected)


def _chi_square_fits(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Chi-square at 99.9 % (Wilson-Hilferty), rare tokens pooled; impossible tokens must not occur."""
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    return ((observed - wanted) ** 2 / wanted).sum() < limit


def test_impossible_tokens_are_never_drawn_and_tiny_ones_hardly():
    logits = torch.tensor([[0.0, float("-inf"), math.log(1e-8), 0.0]])
    counts = many_draws(logits, 50_000)
    assert counts[1] == 0
    assert counts[2] <= 2
    assert counts[0] + counts[3] >= 49_998


def test_a_single_survivor_is_certain():
    logits = torch.full((1, 9), float("-inf"))
    logits[0, 4] = -123.0
    assert many_draws(logits, 100)[4] == 100


def test_tiny_temperatures_do_not_overflow():
    logits = torch.tensor([[300.0, 100.0, -500.0]])
    assert many_draws(logits, 50, temperature=1e-30)[0] == 50


# ---- independence


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), others=st.integers(0, 6), place=st.integers(0, 6), output_len=st.integers(0, 20))
def test_a_row_draws_the_same_token_alone_and_in_any_batch(seed, others, place, output_len):
    mine = random_logits(1, 64, seed=seed % 1000)
    params = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    one = row(seed, output=range(2, 2 + output_len), **params)
    [alone] = sampler()(mine.clone(), [one]).token_ids
    place = min(place, others)
    rows = [row(i, temperature=i % 3) for i in range(others)]
    logits = random_logits(others, 64, seed=5)
    batch = torch.cat([logits[:place], mine, logits[place:]])
    assert sampler()(batch, [*rows[:place], one, *rows[place:]]).token_ids[place] == alone


def test_seed_and_position_decide_the_token():
    logits = torch.zeros(1, 1000)
    first = [draw(logits, [row(seed)])[0].item() for seed in range(30)]
    assert first == [draw(logits, [row(seed)])[0].item() for seed in range(30)]
    assert len(set(first)) > 25
    assert len({draw(logits, [row(3, output=[9] * n)])[0].item() for n in range(30)}) > 25


def test_neutral_rows_are_bit_unchanged_beside_edited_ones():
    logits = random_logits(3, 40)
    rows = [row(temperature=0), row(temperature=0, logit_bias={7: 3.0}), row(temperature=0, presence_penalty=1.0, output=[9])]
    work = sampler()._edited(logits, rows, [r.traits for r in rows])
    assert torch.equal(work[0], logits[0])
    changed = (work != logits).nonzero().tolist()
    assert changed == [[1, 7], [2, 9]]


# ---- filters


def test_top_p_keeps_tokens_whose_preceding_mass_is_at_most_p():
    logits = [math.log(p) for p in (0.125, 0.5, 0.125, 0.25)]
    exact = torch.softmax(torch.tensor(logits), -1)
    assert fixed_point(exact).tolist() == [FIXED_ONE // 8, FIXED_ONE // 2, FIXED_ONE // 8, FIXED_ONE // 4]
    assert kept(logits, top_p=0.49) == [1]
    assert kept(logits, top_p=0.5) == [1, 3]
    assert kept(logits, top_p=0.74) == [1, 3]
    assert kept(logits, top_p=0.75) == [0, 1, 3]  # of the equal two, the lower id
    assert kept(logits, top_p=1e-9) == [1]


def test_top_k_breaks_ties_by_lower_id():
    assert kept([1.0, 2.0, 1.0, 2.0, 1.0], top_k=3) == [0, 1, 3]
    assert kept([0.0, -0.0, 0.0, -0.0], top_k=2) == [0, 1]
    assert kept([1.0, 2.0], top_k=9) == [0, 1]


def test_the_shorter_of_top_p_and_top_k_wins():
    logits = [3.0, 2.0, 1.0, 0.0]
    assert kept(logits, top_k=2, top_p=0.99) == [0, 1]
    assert kept(logits, top_k=4, top_p=0.3) == [0]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    levels=st.sampled_from([3, 50, 10**6]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([-1, 1, 7, 8, 9, 20]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_filtering_by_candidates_equals_filtering_by_a_full_sort(seed, scale, levels, top_p, top_k, min_p):
    logits = (random_logits(3, 60, seed, scale) * levels).round() / levels  # few levels make many ties
    params = [SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p), SamplingParams(top_p=0.8), SamplingParams(top_k=4)]
    probs = torch.softmax(logits, -1)
    assert torch.equal(filter_candidates(probs, params, num_candidates=8), filter_sorted(probs, params))


def test_min_p_is_relative_to_the_largest():
    logits = [math.log(p) for p in (0.5, 0.26, 0.24)]
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept(logits, min_p=1.0) == [0]
    assert kept(logits, min_p=0.0) == [0, 1, 2]


# ---- edits


def edited(logits: list[float], **arguments) -> list[float]:
    tensor = torch.tensor(logits)
    LogitEdits(EOS).apply(tensor, row(**arguments))
    return tensor.tolist()


def test_bias_is_added_before_the_penalties():
    assert edited([0.0, 0.0, 1.0, -1.0], prompt=[2], logit_bias={2: 1.0, 3: -1.0}, repetition_penalty=2.0) == [0.0, 0.0, 1.0, -2.0]


def test_repetition_counts_prompt_and_output_once_each():
    logits = [4.0, -4.0, 4.0, 4.0]
    assert edited(logits, prompt=[0, 0, 1], output=[2], repetition_penalty=2.0) == [2.0, -8.0, 2.0, 4.0]


@given(tokens=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=6))
def test_what_a_sequence_has_seen_is_remembered_over_its_steps(tokens):
    edits, one, other = LogitEdits(EOS, max_remembered=1), row(prompt=[0], repetition_penalty=2.0), row(prompt=[9], repetition_penalty=2.0)
    for step, new in enumerate(tokens):
        one.token_ids += new
        if step % 2:
            edits.apply(torch.ones(10), other)  # pushes `one` out of the memory: it is built again
        logits = torch.ones(10)
        edits.apply(logits, one)
        assert logits.tolist() == [0.5 if i in one.token_ids else 1.0 for i in range(10)]


def test_frequency_and_presence_count_output_only():
    assert edited([0.0] * 4, prompt=[0, 1], output=[2, 2, 3], frequency_penalty=0.5, presence_penalty=1.0) == [0.0, 0.0, -2.0, -1.5]


def test_no_end_before_min_tokens():
    assert edited([0.0] * 4, output=[2], min_tokens=2, stop_token_ids=(3,)) == [0.0, float("-inf"), 0.0, float("-inf")]
    assert edited([0.0] * 4, output=[2, 2], min_tokens=2, stop_token_ids=(3,)) == [0.0] * 4


def test_greedy_respects_edits():
    logits = torch.tensor([[0.0, 9.0, 5.0, 4.9]])
    assert sampler()(logits, [row(temperature=0, min_tokens=3)]).token_ids == [[2]]
    assert sampler()(logits, [row(temperature=0, min_tokens=3, output=[2], presence_penalty=0.2)]).token_ids == [[3]]


# ---- log-probabilities, failures


def test_logprobs_are_those_of_the_unmodified_distribution():
    logits = random_logits(2, 20, seed=9)
    rows = [row(temperature=0.3, top_k=2, top_logprobs=4, logprobs=True, logit_bias={3: 9.0}), row(temperature=0)]
    result = sampler()(logits, rows)
    raw = torch.log_softmax(logits[0], -1)
    [entry] = result.logprobs[0]
    assert entry.logprob == pytest.approx(raw[result.token_ids[0][0]].item(), abs=1e-6)
    assert [token for token, _ in entry.top] == raw.topk(4).indices.tolist()
    assert 1 not in result.logprobs


def test_all_log_probabilities_sum_to_one():
    result = sampler()(random_logits(1, 50), [row(top_logprobs=50, temperature=0)])
    assert sum(math.exp(value) for _, value in result.logprobs[0][0].top) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("bad", [[float("nan"), 1.0, 2.0], [float("inf"), 1.0, 2.0], [float("-inf")] * 3])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "logprobs": True}])
def test_invalid_logits_fail_only_their_row(bad, params):
    logits = torch.tensor([[0.0, 9.0, 1.0], bad, [9.0, 0.0, 1.0]])
    result = sampler()(logits, [row(temperature=0), row(**params), row(temperature=0)])
    assert list(result.errors) == [1]
    assert "invalid logits" in result.errors[1]
    assert (result.token_ids[0], result.token_ids[2]) == ([1], [0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("top_k", 0), ("min_p", 1.5), ("max_tokens", 0)],
)
def test_parameters_outside_their_range_are_refused(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


# ---- on the device


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.05}, {"top_p": 0.5, "top_k": 40}])
def test_rows_drawn_on_the_device_get_the_tokens_of_the_general_way(filters):
    logits = random_logits(24, 700)
    kinds = [{"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 0}]
    rows = [row(1000 + i, output=range(i), **kinds[i % 3], **(filters if i % 2 else {})) for i in range(24)]
    for seq in rows[::4]:  # a seed of its own: these race
        seq.request = replace(seq.request, params=replace(seq.request.params, seed=seq.seed))
    ids, best = SAMPLE_ROWS.reference(logits, row_draws(rows, logits.device), 600)
    assert [[token] for token in ids.tolist()] == sampler(600)(logits, rows).token_ids
    assert torch.equal(best, logits[:, :600].amax(1))
