"""One HTTP request in flight: its engine requests on one rank, and the mailbox in which their outputs arrive."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from engine.request import Output, Timing
from server.errors import ApiError
from server.protocol import Reply

# A box with as much is full. A reader may leave it full for `SLOW_READER_S`; how much waits in all of them is bounded by their owner.
MAX_MAIL = 1024
MAX_MAIL_BYTES = 4 * 2**20
MAX_BATCH = 64  # outputs that are framed in one go, a few milliseconds
SLOW_READER_S = 30.0
# What an output takes in the front's memory: by itself, for each token, each log-probability and each alternative (measured).
OUTPUT_BYTES, TOKEN_BYTES, LOGPROB_BYTES, ALTERNATIVE_BYTES = 300, 36, 120, 116


def size_of(output: Output) -> int:
    """About how many bytes of memory an output takes."""
    size = OUTPUT_BYTES + TOKEN_BYTES * len(output.token_ids)
    for logprob in output.logprobs:
        size += LOGPROB_BYTES + ALTERNATIVE_BYTES * len(logprob.top)
    return size


class Mailbox:
    """Outputs in arrival order as (choice, output). One reader. A failure is delivered after what arrived before it.

    num_bytes: what waits takes, by `size_of`.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._items: deque[tuple[int, Output]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._reader_until_s = 0.0
        self._failure: ApiError | None = None
        self._full_since_s: float | None = None

    def put(self, choice: int, output: Output) -> bool:
        """False when the reader has left the box full for too long."""
        self._items.append((choice, output))
        self.num_bytes += size_of(output)
        self._call_reader()
        if not self._full:
            self._full_since_s = None
        elif self._full_since_s is None:
            self._full_since_s = time.monotonic()
        return self._full_since_s is None or time.monotonic() - self._full_since_s < SLOW_READER_S

    @property
    def _full(self) -> bool:
        return len(self._items) >= MAX_MAIL or self.num_bytes > MAX_MAIL_BYTES

    def give_up(self, error: ApiError) -> int:
        """Fail, and drop what waits: its reader will not come. Returns how many outputs those were."""
        dropped = len(self._items)
        self._items.clear()
        self.num_bytes = 0
        self.fail(error)
        return dropped

    def fail(self, error: ApiError) -> None:
        if self._failure is None:
            self._failure = error
            self._call_reader()

    def end_silence(self, now_s: float) -> None:
        """Let a reader go that has waited long enough. One sweep over all boxes is cheaper than a timer per token."""
        if self._reader is not None and now_s >= self._reader_until_s:
            self._call_reader()

    def _call_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self, timeout_s: float) -> list[tuple[int, Output]]:
        """What has arrived, at most `MAX_BATCH` outputs; an empty list when `end_silence` came after `timeout_s` of silence.

        Raises:
            ApiError: the request failed.
        """
        if not self._items and self._failure is None:
            self._reader_until_s = time.monotonic() + timeout_s
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        elif len(self._items) > MAX_BATCH:
            await asyncio.sleep(0)  # the backlog of a slow reader: other streams have their turn between its pieces
        items = [self._items.popleft() for _ in range(min(len(self._items), MAX_BATCH))]
        self.num_bytes = self.num_bytes - sum(size_of(output) for _, output in items) if self._items else 0
        if not self._full:
            self._full_since_s = None
        if self._failure is not None and not items:
            raise self._failure
        return items


@dataclass(slots=True)
class Ticket:
    """`queued_tokens`: prompt tokens that the rank has not prefilled as far as the front knows. Times are of the monotonic clock.

    `timing`: where the first choice's time to first token went. `saving`: where the router expects the cached tokens to come from.
    `drafted`, `accepted`: speculated tokens of all choices. `held_bytes`: of log-probabilities that wait for the end of the answer.
    """

    request_id: str
    rank: int
    engine_ids: list[str]
    prompt_len: int
    queued_tokens: int
    started_s: float
    mailbox: Mailbox = field(default_factory=Mailbox)
    first_output_s: float | None = None
    last_output_s: float = 0.0
    cached_tokens: int = 0
    saving: str = ""
    timing: Timing | None = None
    drafted: int = 0
    accepted: int = 0
    generated_tokens: int = 0
    held_bytes: int = 0
    open_choices: set[int] = field(default_factory=set)
    closed: bool = False
    fingerprint: bytes = b""
    explanation: asyncio.Future[Reply] | None = None

    @property
    def queued(self) -> bool:
        return self.first_output_s is None
