"""What commands read of a running server: figures that are late are waited for, and those of a hung rank are not."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_cli import live
from deepinfer_cli.api import Api, RequestRefused
from deepinfer_cli.live import settled_metrics


class Scripted(Api):
    """Answers with one document after the other, then with the last for ever."""

    def __init__(self, *documents: Any) -> None:
        super().__init__("http://127.0.0.1:1")
        self.documents, self.asked = list(documents), 0

    def get(self, path: str, timeout_s: float = 5.0) -> Any:
        self.asked += 1
        document = self.documents[min(self.asked, len(self.documents)) - 1]
        if isinstance(document, Exception):
            raise document
        return document


def at(time: float, *reports: float) -> dict[str, Any]:
    return {"time": time, "ranks": [{"rank": rank, "report_time": report} for rank, report in enumerate(reports)]}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LOOK_S", 0.0)


def test_figures_are_those_of_reports_that_came_after_the_question() -> None:
    api = Scripted(at(10.0, 9.9, 9.6), at(10.1, 10.05, 9.6), at(10.2, 10.05, 10.0), at(10.3, 10.05, 10.15), at(10.4, 10.3, 10.3))
    assert settled_metrics(api) == at(10.3, 10.05, 10.15)
    assert api.asked == 4


def test_rank_that_reports_no_more_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_PATIENCE_S", 0.0)
    assert settled_metrics(Scripted(at(10.0, 3.0))) == at(10.0, 3.0)


def test_server_without_ranks_report_times_or_route_is_taken_as_it_is() -> None:
    for document in ({}, {"time": 1.0, "ranks": []}, {"time": 1.0, "ranks": [{"rank": 0}]}):
        assert settled_metrics(Scripted(document)) == document
    assert settled_metrics(Scripted(RequestRefused(404, "not found"))) == {}
