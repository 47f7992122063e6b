"""Operations that the front has sent to ranks, and their answers."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from server import protocol
from server.errors import ApiError, BadRequest, Unavailable

TIMEOUT_S = 30.0
Answer = asyncio.Future[protocol.Reply]


class Operations:
    """The open ones by their number, which is never used twice."""

    def __init__(self) -> None:
        self._open: dict[int, Answer] = {}
        self._numbers = itertools.count(1)

    def open(self) -> tuple[int, Answer]:
        """A number to send along, and where the answer to it arrives."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = answer
        answer.add_done_callback(lambda _: self._close(number, answer))
        return number, answer

    def _close(self, number: int, answer: Answer) -> None:
        self._open.pop(number, None)
        if not answer.cancelled():
            answer.exception()  # looked at: one failure ends all questions, and whoever asked several of them raises it once

    def settle(self, reply: protocol.Reply) -> None:
        """An answer came. One that nobody waits for any more is dropped."""
        answer = self._open.get(reply.operation)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def fail_all(self, error: ApiError) -> None:
        for answer in list(self._open.values()):
            if not answer.done():
                answer.set_exception(error)


async def results(answers: list[Answer], *, any_suffices: bool = False) -> list[dict[str, Any]]:
    """What the ranks that did it say.

    Raises:
        BadRequest: a rank refused it, or with `any_suffices` every rank did. Unavailable: a rank did not answer.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            replies = [await answer for answer in answers]
    except TimeoutError:
        raise Unavailable("rank_failed", "a rank did not answer in time") from None
    finally:
        for answer in answers:
            answer.cancel()
    refused = [reply.error for reply in replies if reply.error]
    if refused and not (any_suffices and len(refused) < len(replies)):
        raise BadRequest(None, refused[0])
    return [reply.result for reply in replies if not reply.error]
