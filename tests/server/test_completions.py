from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from server import completions


class Begun:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("failure", [RuntimeError("a fault of ours"), asyncio.CancelledError()], ids=["fault", "cancelled"])
def test_prompts_that_have_begun_are_closed_when_a_later_one_cannot_begin(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    first, calls = Begun(), iter((None, failure))

    async def begin(*_: Any) -> Begun:
        if (raised := next(calls)) is not None:
            raise raised
        return first

    async def in_place(*arguments: Any, **_: Any) -> Any:
        return [[1], [2]] if arguments else None

    async def body(_: Any) -> dict[str, Any]:
        return {}

    front: Any = SimpleNamespace(
        metrics=SimpleNamespace(received_total=0, note_unknown=lambda _: None),
        bodies=SimpleNamespace(read_object=body),
        workers=SimpleNamespace(run=in_place),
        checked_grammar=in_place,
        text=SimpleNamespace(plain_constraint=None),
        limits=SimpleNamespace(vocab_size=10),
        bounds=None,
    )
    http: Any = SimpleNamespace(state=SimpleNamespace(small_body=True))
    for name, value in (
        ("parse_common", SimpleNamespace(unknown=())),
        ("refuse_plain_extras", None),
        ("parse_prompts", []),
        ("resolve_max_tokens", 4),
    ):
        monkeypatch.setattr(completions, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(completions, "begin", begin)
    with pytest.raises(type(failure)):
        asyncio.run(completions.create(front, http))
    assert first.closed
