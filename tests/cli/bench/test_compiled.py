from __future__ import annotations

from typing import Any

import pytest

from deepinfer_cli.api import RequestRefused
from deepinfer_cli.bench.compiled import await_compiled


class Said:
    """What an `Ui` was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str, _style: str = "") -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Server:
    """Answers with one document after the other, the last one for ever."""

    def __init__(self, *documents: Any) -> None:
        self.documents = list(documents)
        self.asked = 0

    def get(self, path: str) -> Any:
        assert path == "/deepinfer/metrics"
        self.asked += 1
        document = self.documents.pop(0) if len(self.documents) > 1 else self.documents[0]
        if isinstance(document, Exception):
            raise document
        return document


def ranks(*compiling: int) -> dict[str, Any]:
    return {"ranks": [{"rank": rank, "compiling": value} for rank, value in enumerate(compiling)]}


def wait(server: Any, **limits: float) -> Said:
    said: Any = Said()
    await_compiled(server, said, look_s=0.0, **limits)
    return said


def test_nothing_is_measured_while_a_rank_compiles() -> None:
    server = Server(ranks(1, 1), ranks(0, 1), ranks(0, 0))
    said = wait(server)
    assert server.asked == 3
    assert len(said.notes) == 1
    assert not said.warnings


@pytest.mark.parametrize("document", [ranks(0, 0), {}, {"ranks": None}, {"ranks": [3]}, [1], RequestRefused(404, "no such path")])
def test_servers_that_do_not_compile_or_say_nothing_are_not_waited_for(document: Any) -> None:
    server = Server(document)
    said = wait(server)
    assert server.asked == 1
    assert not said.notes + said.warnings


def test_a_build_without_end_is_said() -> None:
    said = wait(Server(ranks(1)), patience_s=0.0)
    assert len(said.warnings) == 1
    assert "eager" in said.warnings[0]
