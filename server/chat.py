"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answers import Head, chat_delta, chunk_choice, complete_choice, logprobs_of, new_head, timing_of, usage
from server.choice import Choice, Entry
from server.errors import ApiError
from server.front_state import Front
from server.generation import Generation, begin, event_stream, rank_headers, resolve_max_tokens
from server.json_response import JsonResponse
from server.output_parser import Delta, DeltaKind
from server.rendering import RenderedPrompt
from server.schemas import CommonRequest, default_max_tokens, parse_common
from server.streaming import DONE, KEEP_ALIVE, error_event, event, until_disconnect
from server.text import MAX_EFFORT

# With the value 1 the chunk that carries the usage also says where the time went, in the field `deepinfer`.
TIMING_HEADER = "x-deepinfer-timing"


async def create(front: Front, http: HttpRequest) -> Response:
    """Validate, render, dispatch, answer. Every refusal happens before the status line.

    Raises:
        ApiError: the refusal. ClientGone: the client left a non-streaming request.
    """
    front.metrics.received_total += 1
    body = await front.bodies.read_object(http)
    request = parse_common(body, front.bounds, chat=True)
    front.metrics.note_unknown(request.unknown)
    if body.get("messages") is None:
        raise ApiError(400, "missing_field", "messages is missing", param="messages")
    small = http.state.small_body
    salt = front.tenants.salt(http.state.key_id, request.cache_salt)
    rendered = await front.render_chat(body, salt, inline=small)
    front.metrics.oddities["history_missing_reasoning"] += rendered.missing_reasoning
    thinking = rendered.thinking
    default = default_max_tokens(thinking.enabled, thinking.number >= MAX_EFFORT)
    max_tokens = resolve_max_tokens(front, request, len(rendered.token_ids), default)
    grammar = await front.checked_grammar(await front.workers.run(front.text.chat_constraint, body, rendered, inline=small))
    one_call = body.get("parallel_tool_calls") is False
    generation = await begin(
        front,
        http,
        request,
        rendered.token_ids,
        max_tokens,
        lambda: front.text.chat_parser(rendered, request.stop, one_call),
        grammar,
        anchor_tokens=rendered.anchor_tokens,
        continued=rendered.keeps_answer and front.config.splice_sampled_ids,
    )
    head = new_head("chat.completion", "chatcmpl", request.model)
    headers = rank_headers(front, generation.ticket)
    if not request.stream:
        try:
            answer = await until_disconnect(http.receive, _complete(generation, request, head, rendered))
        finally:
            generation.close()
        return JsonResponse(answer, headers=headers)
    timed = http.headers.get(TIMING_HEADER) == "1"
    return event_stream(front, _events(generation, request, head, rendered, timed), generation.close, headers)


async def _complete(generation: Generation, request: CommonRequest, head: Head, rendered: RenderedPrompt) -> dict[str, Any]:
    thinking, alias = rendered.thinking.enabled, generation.front.config.reasoning_alias
    logprobs: list[dict[DeltaKind, list[Entry]]] = [{kind: [] for kind in DeltaKind} for _ in generation.choices]
    async for batch in generation.pieces():
        for choice, piece in batch or ():
            logprobs[choice.index][piece.kind] += choice.logprobs(piece)
    choices = [
        complete_choice(choice, thinking=thinking, reasoning_alias=alias, logprobs=logprobs[choice.index] if request.logprobs else None)
        for choice in generation.choices
    ]
    explained = await generation.explanation(rendered.tools, rendered.spliced)
    return {**head.with_choices(choices), "usage": usage(generation.ticket, generation.choices), **explained}


class ChunkWriter:
    """Frames pieces as chunks of one stream, with usage and times where the client asked for them."""

    def __init__(self, generation: Generation, request: CommonRequest, head: Head, timed: bool) -> None:
        self.generation = generation
        self.request = request
        self.head = head
        self.timed = timed
        self.reasoning_alias = generation.front.config.reasoning_alias

    def chunk(self, choices: list[dict[str, Any]], usage_now: dict[str, Any] | None = None, **extra: Any) -> bytes:
        value = {**self.head.with_choices(choices, ".chunk"), **extra}
        if self.request.continuous_usage:
            value["usage"] = usage(self.generation.ticket, self.generation.choices)
        elif self.request.include_usage:
            value["usage"] = usage_now
        return event(value)

    def opening(self, explained: dict[str, Any]) -> bytes:
        return b"".join(
            self.chunk([chunk_choice(choice.index, {"role": "assistant", "content": ""})], **(explained if choice.index == 0 else {}))
            for choice in self.generation.choices
        )

    def piece(self, choice: Choice, piece: Delta) -> bytes:
        entries = choice.logprobs(piece)
        logprobs = logprobs_of(piece.kind, entries) if entries else None
        return self.chunk([chunk_choice(choice.index, chat_delta(piece, self.reasoning_alias), None, logprobs)])

    def finish(self, choice: Choice) -> bytes:
        last = chunk_choice(choice.index, {}, choice.finish_reason)
        if choice.stop_reason is not None:
            last["stop_reason"] = choice.stop_reason
        return self.chunk([last])

    def closing(self) -> bytes:
        if not self.request.include_usage:
            return DONE
        times = {"deepinfer": timing_of(self.generation.ticket)} if self.timed else {}
        return self.chunk([], usage(self.generation.ticket, self.generation.choices), **times) + DONE


async def _events(
    generation: Generation, request: CommonRequest, head: Head, rendered: RenderedPrompt, timed: bool
) -> AsyncIterator[bytes]:
    writer = ChunkWriter(generation, request, head, timed)
    ended: set[int] = set()
    try:
        yield writer.opening(await generation.explanation(rendered.tools, rendered.spliced))
        async for batch in generation.pieces():
            if batch is None:
                yield KEEP_ALIVE
                continue
            data = [writer.piece(choice, piece) for choice, piece in batch]
            for choice in generation.choices:
                if choice.finish_reason is not None and choice.index not in ended:
                    ended.add(choice.index)
                    data.append(writer.finish(choice))
            if data:
                yield b"".join(data)
    except ApiError as error:
        yield error_event(error)
        return
    yield writer.closing()
