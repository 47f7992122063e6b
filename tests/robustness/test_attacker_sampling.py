"""Sampling parameters at the ends of what the API allows, on logits as odd as a model may make them.

One such request must not end its rank: every row gets a token that exists, or an error of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.request import Request, SamplingParams, Sequence
from engine.sampler import Sampler
from engine.spec_decode import Proposals
from server.schemas import Bounds, parse_common

VOCAB, TOKENS, LARGE = 24, 20, 3e38  # the last four ids have no token
LEAST = 5e-324
BOUNDS = Bounds(("m",), VOCAB, 1000)


def sequence(number: int, params: SamplingParams) -> Sequence:
    """A prompt that holds an id without a token as well: plain completions may send any id of the vocabulary."""
    prompt, output = [3, 4, VOCAB - 1], [5, 5]
    return Sequence(number, Request(f"r{number}", prompt, params), 0.0, number, [*prompt, *output], len(prompt), len(prompt))


def allowed(fields: dict[str, Any]) -> SamplingParams:
    """As the server understands a body."""
    return parse_common({"model": "m", **fields}, BOUNDS, chat=True).params(0, 1000)


BIASES = [*({str(i): bias for i in range(VOCAB)} for bias in (-100, 100)), {"5": 100}, {"3": -100, "23": 100}]
ends = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, LEAST, 1e-30, 1e-3, 1.0, 2]),
        "top_p": st.sampled_from([LEAST, 1e-9, 0.5, 1]),
        "top_k": st.sampled_from([-1, 1, 2, 2**31 - 1]),
        "min_p": st.sampled_from([0, LEAST, 0.5, 1]),
        "repetition_penalty": st.sampled_from([LEAST, 1e-45, 1e-40, 1e-38, 1e-3, 10]),
        "presence_penalty": st.sampled_from([-2, 2]),
        "frequency_penalty": st.sampled_from([-2, 2]),
        "logit_bias": st.sampled_from(
            [{str(i): bias for i in range(VOCAB)} for bias in (-100, 100)] + [{"5": 100}, {"3": -100, "23": 100}]
        ),
        "seed": st.sampled_from([-(2**63), 2**63 - 1]),
        "min_tokens": st.sampled_from([0, 1000]),
        "stop_token_ids": st.sampled_from([[], list(range(TOKENS - 1)), list(range(VOCAB))]),
        "logprobs": st.just(True),
    },
)
logits_of_a_row = st.lists(st.sampled_from([-LARGE, -30.0, -1e-30, 0.0, 1e-30, 1.0, 30.0, LARGE]), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=300, deadline=None)
@given(fields=ends, values=logits_of_a_row)
@example({"repetition_penalty": LEAST}, [1.0] * VOCAB)
@example({"repetition_penalty": LEAST, "seed": 1}, [-1.0] * VOCAB)
@example({"min_tokens": 1000, "stop_token_ids": list(range(VOCAB))}, [1.0] * VOCAB)
def test_every_row_gets_a_token_that_exists_or_an_error_of_its_own(fields: dict[str, Any], values: list[float]) -> None:
    odd, plain = sequence(1, allowed(fields)), sequence(2, SamplingParams(temperature=0.0))
    row, alone = torch.tensor(values), torch.arange(VOCAB, dtype=torch.float32)
    sampler = Sampler(TOKENS, frozenset([1]))
    sampled = sampler(torch.stack([row, alone]), [odd, plain])
    checked(sampled.token_ids[0], sampled.errors)
    assert (sampled.token_ids[1], 1 in sampled.errors) == ([TOKENS - 1], False), "the neighbour"
    even = torch.full((1, 2, VOCAB), 1 / VOCAB)
    verified = sampler.verify(row.repeat(3, 1), [odd], [[5, 6]], Proposals({1: 0}, even))
    checked(verified.token_ids[0], verified.errors)


def checked(token_ids: list[int], errors: dict[int, str]) -> None:
    assert 0 in errors or all(0 <= token < TOKENS for token in token_ids), (token_ids, errors)


@pytest.mark.parametrize("penalty", [LEAST, 1e-40, 1e-38, 10])
def test_a_repetition_penalty_of_any_size_leaves_a_choice(penalty: float) -> None:
    """It divides the logits of seen ids: they leave the range of fp32, and what is infinite twice has no difference."""
    chosen = Sampler(TOKENS, frozenset([1]))(torch.ones(1, VOCAB), [sequence(1, allowed({"repetition_penalty": penalty, "seed": 7}))])
    assert chosen.errors == {}
    assert (chosen.token_ids[0][0] in (3, 4, 5)) == (penalty < 1)
