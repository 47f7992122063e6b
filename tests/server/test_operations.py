"""Questions to ranks: answers find who asked, refusals and failures reach them, late answers harm nobody."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from server import operations
from server.errors import BadRequest, Unavailable
from server.operations import Operations, results
from server.protocol import Reply


async def test_answers_come_back_in_the_order_of_the_questions() -> None:
    open_ = Operations()
    (first, one), (second, two) = open_.open(), open_.open()
    open_.settle(Reply(second, {"of": 2}))
    open_.settle(Reply(first, {"of": 1}))
    assert await results([one, two]) == [{"of": 1}, {"of": 2}]


@pytest.mark.parametrize(("refusals", "any_suffices", "refused"), [(0, False, False), (1, False, True), (1, True, False), (2, True, True)])
async def test_a_refusal_counts_unless_another_rank_suffices(refusals: int, any_suffices: bool, refused: bool) -> None:
    open_ = Operations()
    asked = [open_.open() for _ in range(2)]
    for rank, (number, _) in enumerate(asked):
        open_.settle(Reply(number, {}, "no such page" if rank < refusals else ""))
    answers = [answer for _, answer in asked]
    if refused:
        with pytest.raises(BadRequest, match="no such page"):
            await results(answers, any_suffices=any_suffices)
    else:
        assert len(await results(answers, any_suffices=any_suffices)) == 2 - refusals


async def test_the_failure_of_the_ranks_ends_every_wait() -> None:
    open_ = Operations()
    _, answer = open_.open()
    open_.fail_all(Unavailable("rank_failed", "gone"))
    with pytest.raises(Unavailable, match="gone"):
        await results([answer])


async def test_a_failure_that_several_ranks_share_is_told_once_and_by_nobody_else() -> None:
    """The loop reports failures that nobody has looked at, each with a traceback: here those of all ranks but the first, and of questions
    whose client has gone."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    open_ = Operations()
    answers = [open_.open()[1] for _ in range(3)]
    open_.open()
    open_.fail_all(Unavailable("rank_failed", "gone"))
    with pytest.raises(Unavailable, match="gone"):
        await results(answers)
    del answers
    await asyncio.sleep(0)
    gc.collect()
    assert not reported


async def test_a_rank_that_is_silent_is_said_to_be_and_its_late_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "TIMEOUT_S", 0.01)
    open_ = Operations()
    (first, one), (second, two) = open_.open(), open_.open()
    with pytest.raises(Unavailable, match="did not answer"):
        await results([one, two])
    open_.settle(Reply(first, {}))
    open_.settle(Reply(second, {}))
    assert one.cancelled()
    assert two.cancelled()
    assert open_.open()[0] > second
