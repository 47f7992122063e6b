"""Tokens that compiled code chooses against those of torch, which define them.

Probabilities are rounded in another order than torch's, so of thousands of rows one may lie on an edge between two tokens. Where all
probabilities are powers of two, both have them exactly, and no token may differ.
"""

import math
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.choices import Choices, step_choices
from engine.draft_sampling import DraftPoint
from engine.drafter import Drafter
from engine.models.native_model import choose_rows
from engine.native_library import default_build_dir, load_library
from engine.random_keys import MASK64
from engine.request import Request, SamplingParams, Sequence
from engine.sampler import Sampler
from engine.spec_decode import NO_PROPOSALS, Proposals
from tests.engine.test_engine_model import make_engine
from tests.engine.test_spec_decode import Table, chi_square_fits, generate, random_dist
from tests.models.golden import PROMPTS, Seq, golden_runner, prefill

KINDS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1e300},
    {"temperature": 1e-29},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 2**40},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_p": 0.8, "top_k": 17, "min_p": 0.01, "temperature": 1.5},
]
_ids = count()


class Compiled:
    """`Drawing` without a model."""

    def __init__(self):
        self.library = load_library(default_build_dir())
        self.work = self.library.dix_open()

    def choose(self, logits, choices: Choices):
        return choose_rows(self.library, self.work, logits, choices)

    def close(self):
        self.library.dix_close(self.work)


@pytest.fixture(scope="module")
def compiled():
    drawing = Compiled()
    yield drawing
    drawing.close()


def samplers(compiled, num_tokens=10**6):
    return Sampler(num_tokens, frozenset()), Sampler(num_tokens, frozenset(), drawing=lambda: compiled)


def sequence(seed, seeded, **params):
    number = next(_ids)
    one = SamplingParams(**{"max_tokens": 100, "seed": seed if seeded else None, **params})
    return Sequence(number, Request(f"r{number}", [3, 4], one), 0.0, seed & MASK64, [3, 4], 2, 2)


def of(rows):
    return step_choices(rows, [len(row.token_ids) for row in rows], [], NO_PROPOSALS)


# ---- draws


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(("vocab", "scale"), [(1, 1.0), (7, 2.0), (16, 0.5), (503, 3.0), (4096, 0.01), (4096, 6.0)])
def test_rows_draw_the_tokens_of_the_definition(compiled, vocab, scale, seeded):
    rows = [sequence(10_000 * i + vocab, seeded, **KINDS[i % len(KINDS)]) for i in range(400)]
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    torch_tokens, tokens = (sampler(logits.clone(), rows).token_ids for sampler in samplers(compiled))
    assert sum(a != b for a, b in zip(torch_tokens, tokens, strict=True)) <= 1


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocab=st.integers(1, 300),
    exponent=st.integers(0, 8),
    seeded=st.booleans(),
    top_p=st.sampled_from([1.0, 0.5, 0.37]),
    top_k=st.sampled_from([-1, 1, 3, 100]),
    data=st.data(),
)
def test_equally_likely_tokens_are_filtered_and_drawn_to_the_bit(compiled, seed, vocab, exponent, seeded, top_p, top_k, data):
    """Ties are kept by rising id, and where the numbers fall decides alone."""
    size = 2 ** min(exponent, int(math.log2(vocab)))
    allowed = data.draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size, unique=True))
    logits = torch.full((1, vocab), -math.inf)
    logits[0, allowed] = 2.5
    row = sequence(seed, seeded, top_p=top_p, top_k=top_k)
    torch_sampler, sampler = samplers(compiled)
    assert sampler(logits.clone(), [row]).token_ids == torch_sampler(logits.clone(), [row]).token_ids


@pytest.mark.parametrize("seeded", [False, True])
def test_draws_follow_the_distribution(compiled, seeded):
    probs, num = random_dist(3, 60, 2.0), 10_000
    rows = [sequence(seed, seeded) for seed in range(num)]
    tokens = compiled.choose(probs.log().expand(num, -1), of(rows))
    assert chi_square_fits(np.bincount(tokens, minlength=60), probs.double().numpy() * num)


def test_a_row_does_not_depend_on_its_batch(compiled):
    rows = [sequence(i, i % 2 == 0, **KINDS[i % len(KINDS)]) for i in range(40)]
    logits = torch.randn(40, 777, generator=torch.Generator().manual_seed(1)) * 3
    together = compiled.choose(logits, of(rows))
    assert together == [compiled.choose(logits[i : i + 1], of([row]))[0] for i, row in enumerate(rows)]


def test_a_row_draws_the_same_beside_rows_that_torch_has_to_see(compiled):
    sampler = samplers(compiled, 500)[1]
    row, others = sequence(5, False, top_p=0.9), [sequence(6, False, top_logprobs=2), sequence(7, True, repetition_penalty=1.3)]
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(2)) * 2
    alone = compiled.choose(logits[:1, :500], of([row]))
    assert sampler(logits, [row, *others]).token_ids[0] == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("seeded", [False, True])
def test_rows_without_a_finite_maximum_give_some_id_and_harm_nobody(compiled, bad, seeded):
    rows = [sequence(i, seeded, top_p=0.9) for i in range(4)]
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))
    whole = compiled.choose(logits, of(rows))
    logits[1, 40], logits[3] = bad, -math.inf
    broken = compiled.choose(logits, of(rows))
    assert [broken[0], broken[2]] == [whole[0], whole[2]]
    assert all(0 <= token < 100 for token in broken)


# ---- verification


def verified(compiled, seed, vocab, scale, num=300):
    """Tokens of sequences with two drafts each, by torch and by compiled code."""
    generator = torch.Generator().manual_seed(seed)
    seqs = [sequence(31 * i + seed, i % 3 == 0, **KINDS[i % len(KINDS)]) for i in range(num)]
    logits = torch.randn(num * 3, vocab, generator=generator) * scale
    table = torch.softmax(logits.view(num, 3, vocab)[:, :2] + torch.randn(num, 2, vocab, generator=generator), -1)
    drafts = torch.multinomial(table.view(-1, vocab), 1, generator=generator).view(num, 2).tolist()
    proposals = Proposals({seq.seq_id: i for i, seq in enumerate(seqs)}, table.contiguous())
    return [sampler.verify(logits.clone(), seqs, drafts, proposals).token_ids for sampler in samplers(compiled)]


@pytest.mark.parametrize(("vocab", "scale"), [(5, 1.0), (503, 3.0), (4096, 6.0)])
def test_drafts_are_kept_and_refused_as_by_the_definition(compiled, vocab, scale):
    torch_tokens, tokens = verified(compiled, 3, vocab, scale)
    assert sum(a != b for a, b in zip(torch_tokens, tokens, strict=True)) <= 1
    assert {len(kept) for kept in tokens} == {1, 2, 3}


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**64 - 1), sizes=st.tuples(st.integers(0, 6), st.integers(0, 6)), data=st.data())
def test_drafts_of_exact_distributions_are_judged_to_the_bit(compiled, seed, sizes, data):
    """The target and the drafter each have a set of equally likely tokens: where they overlap, and beyond, decides."""
    vocab = 100
    target, drafter = (data.draw(st.lists(st.integers(0, vocab - 1), min_size=2**size, max_size=2**size, unique=True)) for size in sizes)
    logits, table = torch.full((2, vocab), -math.inf), torch.zeros(1, 1, vocab)
    logits[:, target], table[0, 0, drafter] = 1.0, 2.0 ** -sizes[1]
    seq = sequence(seed, False)
    drafts, proposals = [[data.draw(st.sampled_from(drafter))]], Proposals({seq.seq_id: 0}, table)
    want, got = (sampler.verify(logits.clone(), [seq], drafts, proposals) for sampler in samplers(compiled))
    assert got == want


@pytest.mark.parametrize(("seeded", "params"), [(False, {}), (True, {"top_k": 3}), (False, {"temperature": 0.5, "top_p": 0.8})])
def test_sequences_verified_by_compiled_code_follow_the_chain_of_the_target(compiled, seeded, params):
    """The same sequences as by torch, whose distribution `tests/engine/test_spec_decode.py` tests."""
    table = Table(5, seed=5, distance=1.5)
    want = generate(table, 1_000, 3, seeded=seeded, **params)
    got = generate(table, 1_000, 3, Sampler(10**6, frozenset(), drawing=lambda: compiled), seeded=seeded, **params)
    assert (want != got).any(-1).sum() <= 1


# ---- the model's steps


@pytest.fixture(scope="module")
def runners():
    """Compiled models, one whose tokens torch draws."""
    both = golden_runner("F", draft=True, compiled_draws=False), golden_runner("F", draft=True)
    assert both[0].drawing is None
    assert both[1].drawing is not None
    return both


def drafted(runner, seqs, max_drafts):
    """Drafts behind a prompt each."""
    points = []
    for slot, seq in enumerate(seqs, start=1):
        prefill(Seq(runner, PROMPTS[2], slot), [20 + slot])
        seq.state_slot = slot
        points.append(DraftPoint(seq, 5 + slot, 21 + slot))
    drafter = Drafter(runner, max_drafts, frozenset())
    return drafter.propose(points, [max_drafts] * len(seqs)), drafter.proposals, [seq.draft_rates for seq in seqs]


@pytest.mark.parametrize("max_drafts", [1, 3, 4])
def test_a_compiled_block_has_the_drafts_of_torch_and_says_what_they_were_drawn_from(runners, max_drafts):
    kinds = [(False, {"temperature": 0.0}), (True, {}), (False, {}), (False, {"top_p": 0.9}), (True, {"top_k": 4})]
    seqs = [sequence(100 + i, seeded, **params) for i, (seeded, params) in enumerate(kinds)]
    (torch_ids, torch_proposals, torch_rates), (ids, proposals, rates) = (drafted(runner, seqs, max_drafts) for runner in runners)
    assert ids == torch_ids
    torch.testing.assert_close(torch.tensor(rates), torch.tensor(torch_rates), rtol=1e-4, atol=1e-6)
    assert proposals.index == torch_proposals.index == {seqs[2].seq_id: 0, seqs[3].seq_id: 1}
    assert proposals.table.shape == torch_proposals.table.shape
    torch.testing.assert_close(proposals.table, torch_proposals.table, rtol=1e-5, atol=1e-12)


def test_a_block_of_other_sequences_does_not_change_a_draft(runners):
    seqs = [sequence(100 + i, i % 2 == 0, top_p=0.95) for i in range(3)]
    together = drafted(runners[1], seqs, 4)[0]
    prefilled = [DraftPoint(seq, 5 + slot, 21 + slot) for slot, seq in enumerate(seqs, start=1)]
    drafter = Drafter(runners[1], 4, frozenset())
    assert [drafter.propose([point], [4])[0] for point in prefilled] == together


ASKED = [{"temperature": 0.0}, {"seed": 5}, {}, {"top_k": 4}, {"top_p": 0.9, "seed": 2}, {"min_p": 0.1, "temperature": 1.4}]


def answers(requests, **changes):
    """Tokens of an engine's answers, and how many of its steps drew their tokens themselves."""
    engine = make_engine(num_draft_tokens=4, enable_mtp_varlen=False, **changes)
    engine.runner.native.wait()
    drawn, run_drawn = [], engine.runner.run_drawn
    engine.runner.run_drawn = lambda batch, choices: drawn.append(run_drawn(batch, choices)) or drawn[-1]
    for i, params in enumerate(requests):
        engine.add_request(Request(f"{i}", PROMPTS[i % 4], SamplingParams(max_tokens=24, ignore_eos=True, **params)))
    tokens = {f"{i}": [] for i in range(len(requests))}
    while not engine.idle:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    engine.close()
    return tokens, len(drawn)


@pytest.mark.parametrize("changes", [{"spec": False}, {}, {"zero_overhead_scheduling": True}])
def test_an_engine_gives_the_same_tokens_whoever_draws_them(changes):
    """Also beside requests that compiled code cannot serve alone: then every step goes through torch, and its draws do not."""
    compiled, steps = answers(ASKED, **changes)
    by_torch, none = answers(ASKED, compiled_draws=False, **changes)
    assert steps > 5
    assert none == 0
    assert compiled == by_torch
    mixed, fewer = answers([*ASKED, {"top_logprobs": 3, "presence_penalty": 0.3}], **changes)
    assert fewer < steps
    assert {name: mixed[name] for name in compiled} == compiled
