"""Whether a request can be served by a model of given limits."""

from __future__ import annotations

from array import array
from typing import Any

from engine.errors import RequestError
from engine.request import Request
from engine.token_range import first_outside, pack_ids


def check_ids(request: Request, limits: Any) -> array[int] | None:
    """Length and ids of a prompt, and the ids that its parameters name. Returns the prompt as machine integers, None where it does not fit
    them.

    Raises:
        RequestError: empty or too long prompt, an id outside the vocabulary.
    """
    prompt = request.prompt_token_ids
    vocab_size = limits.vocab_size
    if not prompt:
        raise RequestError("the prompt has no tokens", hint="send at least one token")
    if len(prompt) > limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, the limit is {limits.max_model_len}",
            hint="shorten the prompt or raise --max-model-len",
        )
    packed = pack_ids(prompt)
    for what, ids, integers in (
        ("token id", prompt, packed),
        ("logit_bias id", request.params.logit_bias, pack_ids(request.params.logit_bias)),
        ("stop token id", request.params.stop_token_ids, pack_ids(request.params.stop_token_ids)),
    ):
        bad = first_outside(ids, integers, vocab_size)
        if bad is not None:
            raise RequestError(f"{what} {bad} is outside the vocabulary", hint=f"ids are 0 to {vocab_size - 1}")
    return packed
