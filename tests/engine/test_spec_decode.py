"""Acceptance rules: exact distributions over many seeds, extreme probabilities, and how much of the drafts is kept."""

import math
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.distribution import probabilities
from engine.draft_sampling import DraftPoint
from engine.drafter import Drafter
from engine.draws import fixed_point, inverse_cdf, race
from engine.random_keys import MASK64, Purpose, draws53, race_keys
from engine.request import Request, SamplingParams, Sequence
from engine.sampler import Sampler
from engine.spec_decode import NO_PROPOSALS, accepted_prefix, reject

_ids = count()


def chi_square_fits(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Chi-square at 99.9 % (Wilson-Hilferty), rare tokens pooled."""
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = max(1, len(wanted) - 1)
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    return ((observed - wanted) ** 2 / wanted).sum() < limit


def dist(*probs: float) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float32)


def random_dist(seed: int, vocab: int, scale: float = 2.0) -> torch.Tensor:
    return torch.softmax(torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale, -1)


def rejected_tokens(p: torch.Tensor, q: torch.Tensor, num: int, first_seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Drafts from q and the tokens that verification makes of them, one per seed."""
    seeds = list(range(first_seed, first_seed + num))
    places = [7] * num
    drafts = inverse_cdf(fixed_point(q).expand(num, -1), torch.from_numpy(draws53([s + 10**9 for s in seeds], places)))
    accept, residual = (draws53(seeds, places, purpose).tolist() for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL))
    tokens = reject(p.expand(num, -1), q.expand(num, -1), drafts.tolist(), accept, residual)
    return drafts.numpy(), np.array(tokens)


def overlap(p: torch.Tensor, q: torch.Tensor) -> float:
    """1 - TV."""
    p, q = p.double() / p.double().sum(), q.double() / q.double().sum()
    return torch.minimum(p, q).sum().item()


# ---- prefix rule


def test_the_kept_prefix_ends_at_the_first_difference():
    assert accepted_prefix([4, 5, 6], [4, 5, 6, 9]) == 3
    assert accepted_prefix([4, 5, 6], [4, 7, 6, 9]) == 1
    assert accepted_prefix([4], [3, 4]) == 0
    assert accepted_prefix([], [3]) == 0


# ---- rejection


@pytest.mark.parametrize(("seed", "vocab", "scale"), [(1, 4, 1.0), (2, 30, 2.0), (3, 300, 4.0)])
def test_rejection_gives_the_target_distribution_and_keeps_the_overlap(seed, vocab, scale):
    p, q, num = random_dist(seed, vocab, scale), random_dist(seed + 50, vocab, scale), 30_000
    drafts, tokens = rejected_tokens(p, q, num)
    assert chi_square_fits(np.bincount(tokens, minlength=vocab), p.double().numpy() * num)
    share = overlap(p, q)
    assert abs((drafts == tokens).mean() - share) < 3.3 * math.sqrt(share * (1 - share) / num) + 1e-6


EXTREMES = [(1e-10, 1 - 1e-9), (1 - 1e-9, 1e-10), (0.5, 1e-10), (1e-10, 0.5), (0.999999, 0.9), (0.9, 0.999999), (1.0, 0.0), (0.3, 0.3)]


@pytest.mark.parametrize(("first", "other"), EXTREMES)
def test_two_token_distributions_at_the_extremes(first, other):
    p, q, num = dist(first, 1 - first), dist(other, 1 - other), 40_000
    _, tokens = rejected_tokens(p, q, num)
    ones = (tokens == 0).sum()
    mean, spread = num * first, math.sqrt(num * first * (1 - first))
    # Bernstein: a deviation beyond this has a probability below 1e-5.
    assert abs(ones - mean) <= 12 / 3 + math.sqrt(2 * 12) * spread + 1


def test_weights_that_do_not_sum_to_one_change_nothing():
    p, q = random_dist(4, 20), random_dist(5, 20)
    filtered = torch.where(p >= p.topk(6).values[-1], p, 0.0)  # what a filter leaves is not renormalised
    num = 30_000
    _, tokens = rejected_tokens(filtered, q, num)
    assert chi_square_fits(np.bincount(tokens, minlength=20), (filtered.double() / filtered.double().sum()).numpy() * num)


@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 50), scale=st.sampled_from([0.1, 2.0, 30.0]))
def test_the_rule_is_exact_on_its_integers(seed, vocab, scale):
    """Summed over all drafts, acceptance and residual give p without any error: p(x) = min(p, q)(x) + (1 - overlap) residual(x)."""
    wp, wq = fixed_point(random_dist(seed, vocab, scale)).tolist(), fixed_point(random_dist(seed + 1, vocab, scale)).tolist()
    tp, tq = sum(wp), sum(wq)
    kept = [min(a * tq, b * tp) for a, b in zip(wp, wq, strict=True)]
    rest = [max(a * tq - b * tp, 0) for a, b in zip(wp, wq, strict=True)]
    assert sum(rest) == tp * tq - sum(kept) < 2**63
    assert [k + r for k, r in zip(kept, rest, strict=True)] == [a * tq for a in wp]


def test_a_refused_draft_never_comes_back():
    p, q = random_dist(8, 12, 3.0), random_dist(9, 12, 3.0)
    target, proposal = p.expand(2000, -1), q.expand(2000, -1)
    drafts = [i % 12 for i in range(2000)]
    accept = [2**53 - 1] * 2000  # the largest number refuses whatever can be refused
    tokens = reject(target, proposal, drafts, accept, draws53(list(range(2000)), [0] * 2000).tolist())
    for draft, token in zip(drafts, tokens, strict=True):
        assert (token == draft) == (p[draft] / p.sum() >= q[draft] / q.sum())


# ---- the race


@pytest.mark.parametrize(("vocab", "scale"), [(5, 1.0), (200, 3.0)])
def test_the_race_draws_from_its_distribution(vocab, scale):
    p, num = random_dist(vocab, vocab, scale), 20_000
    tokens = race(p.expand(num, -1), torch.from_numpy(race_keys(list(range(num)), [3] * num)))
    assert chi_square_fits(np.bincount(tokens.numpy(), minlength=vocab), p.double().numpy() * num)


def test_the_race_never_draws_what_has_no_probability_and_hardly_what_has_little():
    p = dist(0.0, 1e-8, 1.0, 0.0)
    tokens = race(p.expand(50_000, -1), torch.from_numpy(race_keys(list(range(50_000)), [0] * 50_000)))
    counts = np.bincount(tokens.numpy(), minlength=4)
    assert counts[0] == counts[3] == 0
    assert counts[1] <= 2


def test_the_race_depends_on_its_row_alone():
    probs, keys = torch.stack([random_dist(i, 77) for i in range(11)]), torch.from_numpy(race_keys(list(range(11)), [5] * 11))
    together = race(probs, keys).tolist()
    assert together == [race(probs[i : i + 1], keys[i : i + 1]).item() for i in range(11)]


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_coupled_draws_agree_as_often_as_the_bound_says(scale):
    p = random_dist(21, 100, 2.0)
    q = torch.softmax(p.log() + torch.randn(100, generator=torch.Generator().manual_seed(2)) * scale, -1)
    num = 20_000
    keys = torch.from_numpy(race_keys(list(range(num)), [9] * num))
    agree = (race(p.expand(num, -1), keys) == race(q.expand(num, -1), keys)).double().mean().item()
    distance = 1 - overlap(p, q)
    noise = 3.3 * 0.5 / math.sqrt(num)
    assert (1 - distance) / (1 + distance) - noise <= agree <= 1 - distance + noise


# ---- whole verification


def sequence(seed: int, output: list[int], seeded: bool, **params) -> Sequence:
    number = next(_ids)
    one = SamplingParams(**{"max_tokens": 100, "seed": seed if seeded else None, **params})
    request = Request(f"r{number}", [3, 4], one)
    return Sequence(number, request, 0.0, seed & MASK64, [3, 4, *output], 2, 2)


class Table:
    """A model of order one: the next token's logits depend on the last token. Its drafter has a table of its own."""

    def __init__(self, vocab: int, seed: int, distance: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.randn(vocab, vocab, generator=generator) * 1.5
        self.drafter = self.target + torch.randn(vocab, vocab, generator=generator) * distance

    def draft(self, slices, choose=None):
        last = torch.tensor([piece.token_id for piece in slices])
        ids = []
        for place in range(3):
            logits = self.drafter[last]
            last = logits.argmax(-1) if choose is None else choose(place, logits)
            ids.append(last)
        return _Drafted(torch.stack(ids, 1), torch.zeros(len(slices), 3))

    def draft_greedy(self, slices):
        output = self.draft(slices)
        return output.token_ids.tolist(), output.confidence.tolist()

    def step(self, seqs: list[Sequence], drafter: Drafter, sampler: Sampler, room: int = 3) -> list[list[int]]:
        drafts = drafter.propose([DraftPoint(seq, seq.token_ids[-1], len(seq.token_ids)) for seq in seqs], [room] * len(seqs))
        rows = [token for seq, ids in zip(seqs, drafts, strict=True) for token in [seq.token_ids[-1], *ids]]
        return sampler.verify(self.target[rows], seqs, drafts, drafter.proposals).token_ids


class _Drafted:
    def __init__(self, token_ids, confidence):
        self.token_ids, self.confidence = token_ids, confidence


def generate(table: Table, num: int, length: int, sampler: Sampler | None = None, **params) -> np.ndarray:
    """[num, length] tokens, one sequence per seed, with drafts."""
    drafter, sampler = Drafter(table, 3, frozenset()), sampler or Sampler(10**6, frozenset())
    seqs = [sequence(seed, [], **params) for seed in range(num)]
    while short := [seq for seq in seqs if seq.output_len < length]:
        for seq, new in zip(short, table.step(short, drafter, sampler), strict=True):
            seq.token_ids += new
    return np.array([seq.token_ids[2 : 2 + length] for seq in seqs])


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"temperature": 0.5, "top_p": 0.8}])
@pytest.mark.parametrize("seeded", [False, True])
def test_sequences_of_three_tokens_follow_the_chain_of_the_target(seeded, params):
    vocab, num = 5, 4_000
    table = Table(vocab, seed=5, distance=1.5)
    got = generate(table, num, 3, seeded=seeded, **params)
    step = probabilities(table.target, [SamplingParams(**params)] * vocab).double()
    step = (step / step.sum(-1, keepdim=True)).numpy()
    expected = np.einsum("a,ab,bc->abc", step[4], step, step).ravel() * num
    counts = np.bincount(np.ravel_multi_index(got.T, (vocab,) * 3), minlength=vocab**3)
    assert counts[expected == 0].sum() == 0
    assert chi_square_fits(counts, expected)


def test_coupled_acceptance_is_at_least_four_fifths_of_the_uncoupled():
    rates = []
    for seeded in (False, True):
        table, kept, drafted = Table(50, seed=7, distance=0.5), 0, 0
        drafter, sampler = Drafter(table, 3, frozenset()), Sampler(10**6, frozenset())
        seqs = [sequence(seed, [], seeded) for seed in range(600)]
        for _ in range(4):
            new = table.step(seqs, drafter, sampler)
            for seq, ids in zip(seqs, new, strict=True):
                seq.token_ids += ids
            kept += sum(len(ids) - 1 for ids in new)
            drafted += 3 * len(seqs)
        rates.append(kept / drafted)
    assert 0.8 * rates[0] < rates[1] < rates[0]


def test_penalised_rows_see_the_drafts_before_them():
    sampler = Sampler(10**6, frozenset([1]))
    logits = torch.zeros(3, 8)
    logits[:, 5], logits[:, 6] = 4.0, 3.5
    seq = sequence(0, [], seeded=False, temperature=0, presence_penalty=1.0)
    # Behind [3, 4] the best is 5; with 5 drafted 6 is better; with 5 and 6 drafted both are penalised, and 5 is ahead again.
    assert sampler.verify(logits, [seq], [[5, 6]], NO_PROPOSALS).token_ids == [[5, 6, 5]]
    assert sampler.verify(logits, [seq], [[5, 5]], NO_PROPOSALS).token_ids == [[5, 6]]
    twice = sequence(0, [], seeded=False, temperature=0, repetition_penalty=2.0)
    assert sampler.verify(logits, [twice], [[5, 6]], NO_PROPOSALS).token_ids == [[5, 6, 5]]
    assert sampler.verify(logits[:1], [twice], [[]], NO_PROPOSALS).token_ids == [[5]]  # and forget them afterwards


def test_no_end_before_min_tokens_counts_drafts():
    sampler = Sampler(10**6, frozenset([1]))
    logits = torch.zeros(3, 8)
    logits[:, 1], logits[:, 6] = 9.0, 1.0
    seq = sequence(0, [], seeded=False, temperature=0, min_tokens=2)
    assert sampler.verify(logits, [seq], [[6, 6]], NO_PROPOSALS).token_ids == [[6, 6, 1]]


def test_log_probabilities_belong_to_the_emitted_tokens():
    sampler = Sampler(10**6, frozenset([1]))
    logits = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    seqs = [sequence(0, [], seeded=False, temperature=0, top_logprobs=top) for top in (0, 2)]
    wrong = (best[4] + 1) % 9
    result = sampler.verify(logits, seqs, [[best[0], best[1]], [best[3], wrong, 0]], NO_PROPOSALS)
    assert result.token_ids == [best[:3], best[3:5]]
    raw = torch.log_softmax(logits, -1)
    assert [entry.logprob for entry in result.logprobs[1]] == pytest.approx([raw[3, best[3]].item(), raw[4, best[4]].item()])
    assert [entry.top[0][0] for entry in result.logprobs[1]] == best[3:5]
    assert list(result.logprobs) == [1]


def test_a_bad_row_fails_its_sequence_only_when_it_is_reached():
    sampler = Sampler(10**6, frozenset([1]))
    logits = torch.zeros(6, 5)
    logits[:, 2] = 1.0
    logits[[1, 4]] = float("nan")
    seqs = [sequence(i, [], seeded=False, temperature=t) for i, t in enumerate((0, 0))]
    result = sampler.verify(logits, seqs, [[2, 2], [3, 2]], NO_PROPOSALS)
    assert list(result.errors) == [0]
    assert result.token_ids[1] == [2]
