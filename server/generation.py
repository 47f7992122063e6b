"""The common path of chat and plain completions: limits, dispatch, deadlines, the loop over outputs, and accounting."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from engine.errors import RequestError
from engine.request import Grammar, Request
from server.cache_explain import explanation, wants_explanation
from server.choice import Choice, EndRules
from server.errors import ApiError, BadRequest, Unavailable
from server.front_state import Front
from server.output_parser import Delta, OutputParser
from server.poison import fingerprint
from server.prompt_keys import PromptKeys, prompt_keys
from server.rank_pool import new_engine_id
from server.schemas import CommonRequest
from server.streaming import EventStream
from server.tickets import Ticket
from server.tools import Tools
from server.turn_memory import Turn
from server.turn_splice import sampled_ids_of_turn

KEEP_ALIVE_S = 10.0
INLINE_TOKENS = 4096  # hashing more tokens than this goes to a worker
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key", "x-dynamo-session-id", "x-session-affinity", "x-correlation-id")
MAX_SESSION = 256
Batch = list[tuple[Choice, Delta]]


@dataclass(slots=True)
class Generation:
    """One accepted prompt: its ticket, its choices, and why it ended."""

    front: Front
    ticket: Ticket
    choices: list[Choice]
    prompt_ids: list[int]
    salt: str = ""
    outcome: str = "abort"
    closed: bool = False

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    async def pieces(self) -> AsyncIterator[Batch | None]:
        """Batches of pieces until all choices are over; None marks a silence of `KEEP_ALIVE_S`.

        Raises:
            ApiError: the request failed or ran out of time.
        """
        try:
            while not self.finished:
                items = await self.ticket.mailbox.get(self._patience_s())
                if not items:
                    yield None
                    continue
                batch: Batch = []
                for index, output in items:
                    choice = self.choices[index]
                    batch += [(choice, piece) for piece in choice.feed(output)]
                    if choice.stopped_early:
                        self.front.pool.stop_choice(self.ticket, index)
                yield batch
                self.ticket.held_bytes = sum(choice.held_bytes for choice in self.choices)
        except ApiError:
            self.outcome = "error"
            raise
        self.outcome = self.choices[0].finish_reason or "stop"

    async def explanation(self, tools: Tools | None = None, spliced: int = 0) -> dict[str, Any]:
        """The answer's field `cache_explain`, or nothing when none was asked for. Raises ApiError when the rank failed."""
        found = await explanation(self.ticket.explanation, self.front.text, self.prompt_ids, tools)
        return {} if found is None else {"cache_explain": {**found, "spliced_stretches": spliced}}

    def _patience_s(self) -> float:
        """How long to wait for output before something has to be done. Raises ApiError when a limit has passed."""
        config, waited_s = self.front.config, time.monotonic() - self.ticket.started_s
        patience = KEEP_ALIVE_S
        if config.request_timeout_s:
            left = config.request_timeout_s - waited_s
            if left <= 0:
                raise ApiError(504, "request_timeout", f"not finished after {config.request_timeout_s:g} s", type="timeout_error")
            patience = min(patience, left)
        if self.ticket.queued:
            left = config.queue_timeout_s - waited_s
            if left <= 0:
                if self.front.pool.ranks[self.ticket.rank].stats.get("waiting", 0):
                    raise Unavailable("no_rank", f"still queued after {config.queue_timeout_s:g} s", retry_after_s=5)
                left = 1.0  # it is being prefilled; look again soon
            patience = min(patience, left)
        return max(0.01, patience)

    def close(self) -> None:
        """Account for the request and abort whatever still runs; exactly once."""
        if self.closed:
            return
        self.closed = True
        self.front.pool.close(self.ticket)
        self.front.metrics.finish(self.ticket, self.outcome)
        for choice in self.choices:
            self.front.metrics.oddities.update(asdict(choice.parser.counts))
        if self.outcome in ("stop", "length", "tool_calls"):
            self.front.poison.acquit(self.ticket.fingerprint)
            self._remember(self.prompt_ids + self.choices[0].token_ids)
            self._learn()
        self.front.check_drained()

    def _learn(self) -> None:
        """Keep how the answers were split into tokens: they come back as history."""
        front = self.front
        for choice in self.choices:
            if choice.calls and (front.config.reattach_reasoning or front.config.splice_sampled_ids):
                front.turns.remember(self._turn(choice))
        if front.config.splice_sampled_ids:
            for choice in self.choices:
                front.workers.then(front.sampled.learn, front.text.tokenizer, self.salt, choice.token_ids, callback=lambda _: None)

    def _turn(self, choice: Choice) -> Turn:
        """An answer with calls. Its ids are of use where they spell just what was given out."""
        text, header, token_ids = self.front.text, "", array("I")
        if choice.finish_reason == "tool_calls" and not any(asdict(choice.parser.counts).values()):
            header, token_ids = sampled_ids_of_turn(text.encoder.dialect, text.tokenizer, self.prompt_ids, choice.token_ids)
        calls = tuple((call.name, "".join(call.arguments)) for call in choice.calls)
        call_ids = tuple(call.id for call in choice.calls)
        return Turn(self.salt, call_ids, "".join(choice.content), "".join(choice.reasoning), calls, header, token_ids)

    def _remember(self, token_ids: list[int]) -> None:
        """Tell the router where this sequence is; long ones are hashed in a worker."""
        pool, prompt_len, rank = self.front.pool, len(self.prompt_ids), self.ticket.rank
        started = pool.incarnation

        def ended(keys: PromptKeys) -> None:
            if pool.incarnation == started:
                pool.router.ended(keys, prompt_len, rank)

        if len(token_ids) <= INLINE_TOKENS:
            ended(prompt_keys(token_ids, self.salt, pool.key_space))
        else:
            self.front.workers.then(prompt_keys, token_ids, self.salt, pool.key_space, callback=ended)


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Batch | None], None]:
    """Batches of several prompts of one request as they come, each with the number of its prompt. None waits unread behind another one,
    where it would be taken for the backlog of a slow client.

    Raises:
        ApiError: one of them failed.
    """
    if len(generations) == 1:  # without a task for every batch
        async for batch in generations[0].pieces():
            yield 0, batch
        return
    streams = [generation.pieces() for generation in generations]
    waiting = {asyncio.ensure_future(anext(stream)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                try:
                    batch = task.result()
                except StopAsyncIteration:
                    continue
                yield number, batch
                waiting[asyncio.ensure_future(anext(streams[number]))] = number
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def resolve_max_tokens(front: Front, request: CommonRequest, prompt_len: int, default: int) -> int:
    """Tokens the answer may have. A prompt is never cut; a too large request is clamped unless the server is strict.

    Raises:
        BadRequest: context_length_exceeded.
    """
    context = front.limits.max_model_len
    room = context - prompt_len
    if room <= 0:
        text = f"the prompt has {prompt_len} tokens, the context holds {context} including the answer: shorten the prompt"
        raise BadRequest("messages", text, "context_length_exceeded")
    wanted = request.max_tokens if request.max_tokens is not None else default
    if request.max_tokens is not None and wanted > room and front.config.strict_max_tokens:
        text = f"the prompt has {prompt_len} tokens and max_tokens is {wanted}, the context holds {context}: lower max_tokens to {room}"
        raise BadRequest("max_tokens", text, "context_length_exceeded")
    return min(wanted, room)


async def begin(
    front: Front,
    http: HttpRequest,
    request: CommonRequest,
    prompt_ids: list[int],
    max_tokens: int,
    make_parser: Callable[[], OutputParser],
    grammar: Grammar | None = None,
    *,
    anchor_tokens: int = 0,
    continued: bool = False,
) -> Generation:
    """Hand the choices of one prompt to a rank. After this the caller must call `Generation.close` on every path.

    anchor_tokens: leading tokens of system and tools text, which other prompts are likely to share. continued: the conversation's next
    prompt will begin with this one and its answer.

    Raises:
        ApiError: refused; nothing was started.
    """
    explain = wants_explanation(http)
    salt = front.tenants.salt(http.state.key_id, request.cache_salt)
    inline = len(prompt_ids) <= INLINE_TOKENS
    space = front.pool.key_space
    keys = prompt_keys(prompt_ids, salt, space) if inline else await front.workers.run(prompt_keys, prompt_ids, salt, space)
    try:
        requests = [
            Request(
                new_engine_id(),
                prompt_ids,
                request.params(index, max_tokens),
                cache_read=request.cache_read,
                cache_write=request.cache_write,
                cache_salt=salt,
                cache_scope=front.tenants.scope(http.state.key_id),
                cache_priority=request.cache_priority,
                cache_priority_s=request.cache_priority_s,
                cache_anchor_tokens=anchor_tokens,
                cache_decode=continued and request.n == 1,
                grammar=grammar,
            )
            for index in range(request.n)
        ]
    except RequestError as error:
        raise BadRequest(None, str(error)) from None
    identity = fingerprint(keys.whole, requests[0])
    front.poison.check(identity)
    session = session_of(http, request)
    ticket = front.pool.dispatch(requests, session, request.user, keys, http.state.request_id, explain=explain)
    ticket.fingerprint = identity
    front.metrics.admitted_total += 1
    rules = EndRules(front.text.eos_id, request.ignore_eos, request.min_tokens)
    token_bytes = front.text.tokenizer.token_bytes if request.logprobs else None
    choices = [Choice(index, make_parser(), rules, token_bytes, streamed=request.stream) for index in range(request.n)]
    return Generation(front, ticket, choices, prompt_ids, salt)


def session_of(http: HttpRequest, request: CommonRequest) -> str | None:
    """The client's name for its conversation: headers first, then body fields."""
    for name in SESSION_HEADERS:
        if value := http.headers.get(name):
            return str(value[:MAX_SESSION])
    return request.session


def event_stream(front: Front, events: AsyncIterator[bytes], close: Callable[[], None], headers: dict[str, str]) -> EventStream:
    """A streamed answer that counts as open until it ends; then `close` runs."""
    front.metrics.streams_open += 1

    def on_close() -> None:
        front.metrics.streams_open -= 1
        close()

    return EventStream(events, on_close, headers)


def rank_headers(front: Front, ticket: Ticket) -> dict[str, str]:
    return {"X-DeepInfer-Rank": str(ticket.rank)} if front.config.rank_header else {}
