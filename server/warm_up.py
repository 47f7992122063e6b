"""Fills the prefix cache before the server reports ready: prompts are prefilled at every start of the ranks, and pinned."""

from __future__ import annotations

import logging
import math
from typing import Any

from engine.request import Request, SamplingParams
from server import protocol
from server.errors import BadRequest, ConfigError
from server.front_state import Front
from server.prompt_keys import prompt_keys
from server.rank_pool import finish_error, new_engine_id

_LOOK_S = 10.0
log = logging.getLogger("front")


async def warm_up(front: Front, bodies: list[dict[str, Any]]) -> None:
    """Prefill one prompt after the other, each where the router sends it, and pin it there to the end.

    Raises:
        ConfigError: a prompt that cannot be rendered or computed, or for which the arena has no room. ApiError: the ranks failed.
    """
    pinned = 0
    for number, body in enumerate(bodies, 1):
        try:
            pinned += await _warm_one(front, body)
        except BadRequest as error:
            raise ConfigError(
                f"prompt {number} of server.warm {front.config.warm!r}: {error.message}", hint="correct or remove it"
            ) from error
    log.info("warm-up: %d prompts, %d tokens pinned", len(bodies), pinned)


async def _warm_one(front: Front, body: dict[str, Any]) -> int:
    """Returns the pinned tokens."""
    salt, anchor_tokens = front.tenants.salt("", ""), 0
    if "messages" in body:
        rendered = await front.render_chat(body, salt)
        ids, anchor_tokens = rendered.token_ids, rendered.anchor_tokens
    else:
        ids = await front.workers.run(front.text.tokenizer.encode, body["prompt"], True)
    rank = await _prefill(front, ids, salt, anchor_tokens)
    kept = await front.pool.operate(lambda operation: protocol.KeepPrefix(operation, ids, salt, math.inf), [rank])
    return int(kept[0]["pinned_tokens"])


async def _prefill(front: Front, ids: list[int], salt: str, anchor_tokens: int) -> int:
    """The rank that computed the prompt and one token more."""
    pool = front.pool
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    request = Request(new_engine_id(), ids, params, cache_salt=salt, cache_anchor_tokens=anchor_tokens)
    keys = await front.workers.run(prompt_keys, ids, salt, pool.key_space)
    ticket = pool.dispatch([request], None, "", keys, "warm-up")
    try:
        while True:
            for _, output in await ticket.mailbox.get(_LOOK_S):
                if (error := finish_error(output)) is not None:
                    raise error
                if output.finish_reason is not None:
                    return ticket.rank
    finally:
        pool.close(ticket)
