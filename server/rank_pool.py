"""The front's view of the ranks: the socket, who is ready, what runs where. Dispatches requests and sorts outputs into mailboxes."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

import zmq

from engine.request import FinishReason, Output, Request
from hicache.keys import KeySpace
from server import protocol
from server.config import ServerConfig
from server.errors import ApiError, BadRequest, Unavailable
from server.heartbeat import HeartbeatFile
from server.operations import Operations, results
from server.prompt_keys import PromptKeys
from server.rank_index import RankIndexes
from server.rank_view import RankView
from server.route_cost import RankLoad, shared_queues
from server.router import Router
from server.tickets import Ticket
from server.totals import added, counters_only, empty_record, merged

SWEEP_S = 0.1
MAX_UNREAD_BYTES = 256 * 2**20  # of outputs that wait for all clients together
MAX_HELD_BYTES = 4 * 2**30  # of log-probabilities that wait for the ends of their answers
MAX_BATCH = 8  # a stream spends about 0.1 ms on an output, 0.5 ms on its last one
log = logging.getLogger("front")


class RankPool:
    """All ranks of a server are coupled: they become ready and fail together."""

    def __init__(self, address: str, size: int, config: ServerConfig, router: Router, heartbeats: HeartbeatFile, cp: int = 1) -> None:
        """size: ranks of this host. cp: how many consecutive ones prefill together."""
        self.config = config
        self._cp = cp
        self.router = router
        self.heartbeats = heartbeats
        self.ranks = [RankView(rank) for rank in range(size)]
        self.incarnation = 0
        self.key_space: KeySpace | None = None  # of the ranks' caches, once the router can ask them
        self.serving = self.warming = False
        self.draining = False
        self.dead = False
        self.on_ready: Callable[[], None] = lambda: None
        self.on_output: Callable[[Ticket, Output, float], None] = lambda _ticket, _output, _now: None
        self._owners: dict[str, tuple[Ticket, int]] = {}
        self._operations = Operations()
        self._context = zmq.Context()
        self._look = asyncio.Event()
        self._delivered = 0
        self.slow_readers_total = 0
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)

    # --- life of an incarnation ------------------------------------------------------------------------------------------------------

    def begin_incarnation(self, incarnation: int) -> None:
        """New ranks are being started; what the old ones counted is kept. Their messages may arrive before the news of them."""
        if incarnation <= self.incarnation:
            return
        self.incarnation = incarnation
        self.serving = self.warming = False
        self.router.forget(view.rank for view in self.ranks)
        self.router.stored = self.key_space = None
        for view in self.ranks:
            view.retired = added(view.retired, counters_only(view.stats))
            view.stats, view.report_unix_s, view.limits, view.pid = empty_record(), 0.0, None, 0

    def ask_caches(self, indexes: RankIndexes, incarnation: int) -> None:
        """The router may ask the caches of this incarnation's ranks from now on."""
        if incarnation == self.incarnation and len(indexes):
            self.router.stored, self.key_space = indexes, indexes.space

    def fail_all(self, error: ApiError) -> int:
        """End every open request with an error. Returns how many there were."""
        self.serving = False
        tickets = {id(ticket): ticket for ticket, _ in self._owners.values()}
        for ticket in tickets.values():
            ticket.mailbox.fail(error)
        self._owners.clear()
        self._operations.fail_all(error)
        return len(tickets)

    def running_on(self, rank: int) -> list[bytes]:
        """Fingerprints of the requests that a rank has not finished."""
        return [ticket.fingerprint for ticket in self.ranks[rank].tickets.values() if ticket.open_choices] if rank >= 0 else []

    @property
    def all_connected(self) -> bool:
        return all(view.limits is not None for view in self.ranks)

    @property
    def limits(self) -> protocol.RankLimits | None:
        return self.ranks[0].limits

    @property
    def num_open(self) -> int:
        return len(self.tickets)

    def complaint(self) -> str:
        """Why the ranks do not serve, or ""."""
        if not self.serving:
            return "the ranks are not ready"
        if self.warming:
            return "the prefix cache is being filled"
        return next((text for view in self.ranks if (text := self.heartbeats.read(view.rank).complaint)), "")

    # --- requests --------------------------------------------------------------------------------------------------------------------

    def check_available(self) -> None:
        """Refuse before any work is done.

        Raises:
            Unavailable: 503 draining, starting or engine_dead.
        """
        if self.draining:
            raise Unavailable("draining", "the server is shutting down")
        if self.dead:
            raise Unavailable("engine_dead", "the engine failed and is not restarted", retry_after_s=30)
        if not self.serving:
            code = "starting" if self.incarnation <= 1 else "rank_failed"
            raise Unavailable(code, "the model is not ready yet", retry_after_s=2)

    def dispatch(
        self, requests: list[Request], session: str | None, user: str, keys: PromptKeys, request_id: str, *, explain: bool = False
    ) -> Ticket:
        """Accept the choices of one HTTP request into one rank's queue. `explain` asks what the first of them finds in the prefix cache.

        Raises:
            Unavailable: not serving. ApiError: 429 when the chosen rank's queue is full.
        """
        self.check_available()
        open_ranks = [view for view in self.ranks if view.has_room(requests, self.config.max_queue)]
        if not open_ranks:
            raise ApiError(429, "queue_full", "too many requests are waiting", type="rate_limit_error", retry_after_s=1)
        queued = shared_queues([view.queued_tokens for view in self.ranks], self._cp)
        loads = [RankLoad(view.rank, queued[view.rank], view.sequences) for view in open_ranks]
        first = requests[0]
        decision = self.router.route(session, keys, loads, tie=user, reads_cache=first.cache_read)
        view = self.ranks[decision.rank]
        prompt_len = len(first.prompt_token_ids)
        ticket = Ticket(
            request_id,
            view.rank,
            [request.request_id for request in requests],
            prompt_len,
            max(1, prompt_len - decision.saved_tokens),
            time.monotonic(),
            open_choices=set(range(len(requests))),
            saving=decision.source,
        )
        view.tickets[ticket.engine_ids[0]] = ticket
        if first.cache_write:
            self.router.sent(ticket.engine_ids[0], keys, view.rank)
        for choice, request in enumerate(requests):
            self._owners[request.request_id] = (ticket, choice)
            operation = 0
            if explain and choice == 0:
                operation, ticket.explanation = self._operations.open()
            self._send(view.rank, protocol.AddRequest(request, operation))
        for other in self.ranks:
            if other is not view:
                self._send(other.rank, protocol.Wake())
        return ticket

    def close(self, ticket: Ticket) -> None:
        """The HTTP side is done with a request: abort what still runs. Calling it twice is harmless."""
        if ticket.closed:
            return
        ticket.closed = True
        view = self.ranks[ticket.rank]
        view.tickets.pop(ticket.engine_ids[0], None)
        self.router.computed(ticket.engine_ids[0])
        running = [name for name in ticket.engine_ids if self._owners.pop(name, None) is not None]
        if running:
            self._send(ticket.rank, protocol.Abort(running))

    def stop_choice(self, ticket: Ticket, choice: int) -> None:
        """One choice ended by a rule of the server (stop string, first call): the engine need not go on."""
        ticket.open_choices.discard(choice)
        name = ticket.engine_ids[choice]
        if self._owners.pop(name, None) is not None:
            self._send(ticket.rank, protocol.Abort([name]))

    # --- operations ------------------------------------------------------------------------------------------------------------------

    async def operate(
        self, make: Callable[[int], protocol.ToRank], ranks: list[int] | None = None, *, any_suffices: bool = False
    ) -> list[dict[str, Any]]:
        """Send an operation to ranks (all by default) and wait for every answer. Returns those of the ranks that did it.

        Raises:
            BadRequest: a rank refused it, or with `any_suffices` every rank did. Unavailable: a rank did not answer.
        """
        self.check_available()
        answers = []
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            number, answer = self._operations.open()
            answers.append(answer)
            self._send(rank, make(number))
        return await results(answers, any_suffices=any_suffices)

    def send_fault(self, kind: str, ranks: list[int] | None) -> None:
        """A fault after which no answer comes."""
        self.check_available()
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            self._send(rank, protocol.Fault(0, kind))

    # --- the socket ------------------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, message: protocol.ToRank) -> None:
        # ROUTER with unlimited buffers: a send to a connected rank completes at once, one to a rank that is gone is dropped.
        self._socket.send_multipart([protocol.rank_address(rank, self.incarnation), protocol.encode(message)], zmq.NOBLOCK)
        self._look.set()  # a send may swallow the notice that something arrived

    async def receive_forever(self) -> None:
        """Apply what arrives. The socket's descriptor only tells that its state changed, so every notice is followed by reading all."""
        asyncio.get_running_loop().add_reader(self._socket.FD, self._look.set)
        while True:
            self._look.clear()
            while (parts := self._receive()) is not None:
                rank, incarnation = protocol.parse_address(parts[0])
                self.begin_incarnation(incarnation)
                if incarnation < self.incarnation:
                    continue
                message = protocol.decode_from_rank(parts[1])
                if isinstance(message, protocol.Outputs):
                    await self._deliver_all(message.outputs)
                else:
                    self._apply(self.ranks[rank], message)
            await self._look.wait()

    async def sweep_forever(self) -> None:
        """End silences: readers look at their deadlines and tell their clients that they still wait."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for ticket in self.tickets:
                ticket.mailbox.end_silence(now)
            self.bound_memory()

    @property
    def tickets(self) -> list[Ticket]:
        """Every open request."""
        return [ticket for view in self.ranks for ticket in view.tickets.values()]

    @property
    def unread_bytes(self) -> int:
        """What waits for clients to read it."""
        return sum(ticket.mailbox.num_bytes for ticket in self.tickets)

    @property
    def held_bytes(self) -> int:
        """Log-probabilities that wait for the ends of their answers."""
        return sum(ticket.held_bytes for ticket in self.tickets)

    def bound_memory(self) -> None:
        """While more waits than may: end the request whose client is furthest behind, or whose answer is the largest."""
        while self.unread_bytes > MAX_UNREAD_BYTES:
            self._give_up_slow(max(self.tickets, key=lambda ticket: ticket.mailbox.num_bytes))
        while self.held_bytes > MAX_HELD_BYTES:
            text = "this answer holds the most of too many log-probabilities: ask for a stream, or for fewer"
            largest = max(self.tickets, key=lambda ticket: ticket.held_bytes)
            self._give_up(largest, ApiError(503, "answer_too_large", text, type="server_error"))

    def _give_up_slow(self, ticket: Ticket) -> None:
        self.slow_readers_total += 1
        self._give_up(ticket, ApiError(503, "slow_reader", "the client reads too slowly", type="server_error"))

    def _give_up(self, ticket: Ticket, error: ApiError) -> None:
        """Stop a request and forget what waits for its client."""
        dropped = ticket.mailbox.give_up(error)
        log.warning("%s: a request ended, %d outputs dropped", error.code, dropped, extra={"request_id": ticket.request_id})
        self.close(ticket)

    def _receive(self) -> list[bytes] | None:
        return self._socket.recv_multipart() if self._socket.poll(0) else None

    async def _deliver_all(self, outputs: list[Output]) -> None:
        """Into the mailboxes; after every `MAX_BATCH` outputs the streams get a turn to write theirs."""
        now = time.monotonic()
        for output in outputs:
            self._deliver(output, now)
            self._delivered += 1
            if self._delivered % MAX_BATCH == 0:
                await asyncio.sleep(0)

    def _apply(self, view: RankView, message: protocol.FromRank) -> None:
        match message:
            case protocol.Stats(record):
                view.stats, view.report_unix_s = merged(empty_record(), record), time.time()
            case protocol.Ready(pid, limits):
                view.pid, view.limits = pid, limits
                self.on_ready()
            case protocol.Refused(request_id, text):
                owner = self._owners.pop(request_id, None)
                if owner is not None:
                    owner[0].mailbox.fail(BadRequest(None, text))
            case protocol.Reply():
                self._operations.settle(message)
            case protocol.Fatal(text):
                log.error("rank %d: %s", view.rank, text)

    def _deliver(self, output: Output, now: float) -> None:
        owner = self._owners.get(output.request_id)
        if owner is None:
            return  # aborted meanwhile: the engine's last words about it are of no use
        ticket, choice = owner
        self.on_output(ticket, output, now)
        if ticket.first_output_s is None and (output.token_ids or output.finish_reason):
            ticket.first_output_s = now
            self.router.computed(ticket.engine_ids[0])
        ticket.last_output_s = now
        ticket.generated_tokens += len(output.token_ids)
        if output.cached_tokens is not None:
            # All choices of a request share one prompt; what the first of them reused is what the client is told.
            ticket.cached_tokens = output.cached_tokens if choice == 0 else ticket.cached_tokens
            ticket.timing = output.timing if choice == 0 else ticket.timing
            if choice == 0 and output.timing is not None and output.token_ids:
                self.router.learn(ticket.saving, ticket.prompt_len, output.cached_tokens, output.timing)
        ticket.drafted += output.drafted
        ticket.accepted += output.accepted
        if output.finish_reason is not None:
            del self._owners[output.request_id]
            ticket.open_choices.discard(choice)
        if not ticket.mailbox.put(choice, output):
            self._give_up_slow(ticket)

    def shut(self) -> None:
        self._socket.close()
        self._context.term()


def new_engine_id() -> str:
    """Never the client's request id: two clients may send the same one."""
    return uuid.uuid4().hex


def finish_error(output: Output) -> ApiError | None:
    """The error that an engine's end reason means for a client that still listens, or None for a normal end or none."""
    if output.finish_reason is None:
        return None
    match output.finish_reason:
        case FinishReason.TOO_LONG:
            return BadRequest("messages", output.error or "the prompt is too long", "context_length_exceeded")
        case FinishReason.PREEMPTED:
            return Unavailable("no_rank", output.error or "the request was preempted: not enough cache", retry_after_s=1)
        case FinishReason.ABORT:
            return Unavailable("rank_failed", "the request was aborted by the server")
        case FinishReason.ERROR:
            return ApiError(500, "internal_error", output.error or "generation failed", type="server_error")
    return None
