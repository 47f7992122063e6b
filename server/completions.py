"""POST /v1/completions: plain prompts, no chat format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answers import Head, new_head, plain_logprobs, usage_of
from server.choice import Choice, Entry
from server.errors import ApiError
from server.front_state import Front
from server.generation import Batch, Generation, begin, event_stream, merged, rank_headers, resolve_max_tokens
from server.json_response import JsonResponse
from server.schemas import CommonRequest, parse_common, parse_prompts, refuse_plain_extras
from server.streaming import DONE, KEEP_ALIVE, error_event, event, until_disconnect

DEFAULT_TOKENS = 16


async def create(front: Front, http: HttpRequest) -> Response:
    """Several prompts are several generations; choice numbers run over all of them.

    Raises:
        ApiError: the refusal. ClientGone: the client left a non-streaming request.
    """
    front.metrics.received_total += 1
    body = await front.bodies.read_object(http)
    request = parse_common(body, front.bounds, chat=False)
    front.metrics.note_unknown(request.unknown)
    refuse_plain_extras(body)
    prompts = await front.workers.run(_encode_all, front, parse_prompts(body, front.limits.vocab_size), inline=http.state.small_body)
    grammar = await front.checked_grammar(await front.workers.run(front.text.plain_constraint, body, inline=http.state.small_body))
    limits = [resolve_max_tokens(front, request, len(ids), DEFAULT_TOKENS) for ids in prompts]
    generations: list[Generation] = []

    def close_all() -> None:
        for generation in generations:
            generation.close()

    try:
        for ids, max_tokens in zip(prompts, limits, strict=True):
            generations.append(await begin(front, http, request, ids, max_tokens, lambda: front.text.plain_parser(request.stop), grammar))
    except BaseException:  # whatever it was, those that have begun must end
        close_all()
        raise
    head = new_head("text_completion", "cmpl", request.model)
    headers = rank_headers(front, generations[0].ticket)
    if not request.stream:
        try:
            answer = await until_disconnect(http.receive, _complete(generations, request, head))
        finally:
            close_all()
        return JsonResponse(answer, headers=headers)
    return event_stream(front, _events(generations, request, head), close_all, headers)


def _encode_all(front: Front, prompts: list[str | list[int]]) -> list[list[int]]:
    tokenizer = front.text.tokenizer
    encoded = [tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt for prompt in prompts]
    if not all(encoded):
        raise ApiError(400, "invalid_value", "prompt must not be empty", param="prompt")
    return encoded


def _usage(generations: list[Generation]) -> dict[str, Any]:
    completion = sum(choice.num_tokens for generation in generations for choice in generation.choices)
    prompt = sum(generation.ticket.prompt_len for generation in generations)
    tickets = [generation.ticket for generation in generations]
    drafted, accepted = sum(ticket.drafted for ticket in tickets), sum(ticket.accepted for ticket in tickets)
    return usage_of(prompt, completion, sum(ticket.cached_tokens for ticket in tickets), 0, drafted, accepted)


def _choice(index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None, choice: Choice) -> dict[str, Any]:
    answer = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    if finish_reason is not None and choice.stop_reason is not None:
        answer["stop_reason"] = choice.stop_reason
    return answer


async def _complete(generations: list[Generation], request: CommonRequest, head: Head) -> dict[str, Any]:
    collected = await asyncio.gather(*(_collect(generation) for generation in generations))
    choices: list[dict[str, Any]] = []
    for generation, entries in zip(generations, collected, strict=True):
        for choice in generation.choices:
            logprobs = plain_logprobs(entries[choice.index], 0) if request.logprobs else None
            choices.append(_choice(len(choices), "".join(choice.content), choice.finish_reason, logprobs, choice))
    return {**head.with_choices(choices), "usage": _usage(generations), **await generations[0].explanation()}


async def _collect(generation: Generation) -> list[list[Entry]]:
    """Wait for the end of a generation. Returns the log-probabilities of every choice."""
    entries: list[list[Entry]] = [[] for _ in generation.choices]
    async for batch in generation.pieces():
        for choice, piece in batch or ():
            entries[choice.index] += choice.logprobs(piece)
    return entries


async def _events(generations: list[Generation], request: CommonRequest, head: Head) -> AsyncIterator[bytes]:
    ended: set[int] = set()
    offsets = [0] * (request.n * len(generations))

    def chunk(choices: list[dict[str, Any]], usage_now: dict[str, Any] | None = None) -> bytes:
        value = {**head.with_choices(choices), **explained}
        explained.clear()  # the first chunk carries it
        if request.continuous_usage:
            value["usage"] = _usage(generations)
        elif request.include_usage:
            value["usage"] = usage_now
        return event(value)

    def framed(first: int, generation: Generation, batch: Batch) -> Iterator[bytes]:
        """first: number of the generation's first choice."""
        for choice, piece in batch:
            number = first + choice.index
            logprobs = plain_logprobs(choice.logprobs(piece), offsets[number]) if request.logprobs else None
            offsets[number] += len(piece.text)
            yield chunk([_choice(number, piece.text, None, logprobs, choice)])
        for choice in generation.choices:
            number = first + choice.index
            if choice.finish_reason is not None and number not in ended:
                ended.add(number)
                yield chunk([_choice(number, "", choice.finish_reason, None, choice)])

    try:
        explained = await generations[0].explanation()
        async with aclosing(merged(generations)) as batches:
            async for prompt, batch in batches:
                if batch is None:
                    yield KEEP_ALIVE
                elif data := b"".join(framed(prompt * request.n, generations[prompt], batch)):
                    yield data
    except ApiError as error:
        yield error_event(error)
        return
    yield (chunk([], _usage(generations)) if request.include_usage else b"") + DONE
