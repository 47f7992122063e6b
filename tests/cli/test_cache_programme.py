"""The programme of check-cache against servers whose cache works, lies, or notices nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_cli import cache_programme
from tests.cli.fake_server import serving

Dix = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_programme, "STATS_WAIT_S", 0.0)
    monkeypatch.setattr(cache_programme, "DELAY_S", 0.05)
    monkeypatch.setattr(cache_programme, "GROWTH", (1, 24, 139, 300))


def run(dix: Dix, **options: Any) -> Any:
    with serving(**options) as server:
        return dix("check-cache", "--programme", "--port", server.port, "--max-tokens", 4, "--json")


def part(ran: Any, name: str) -> dict[str, Any]:
    return next(part for part in ran.json["parts"] if part["name"] == name)


def test_working_cache_passes_every_part_and_every_fault_is_noticed(dix: Dix) -> None:
    ran = run(dix, faulty=True)
    assert ran.code == 0
    assert all(not part["wrong"] for part in ran.json["parts"])
    for name in ("growth", "resend"):
        found = part(ran, name)
        assert 0 < found["hit_tokens"] <= found["possible_tokens"]
    assert [p["name"] for p in ran.json["parts"]][-4:] == ["fault flip", "fault drop", "fault short", "fault delay"]


def test_fault_that_goes_unnoticed_exits_1(dix: Dix) -> None:
    ran = run(dix, faulty=True, cache="blind")
    assert ran.code == 1
    assert "unnoticed" in part(ran, "fault flip")["wrong"][0]


def test_other_token_on_a_hit_exits_1_and_is_named(dix: Dix) -> None:
    ran = run(dix, cache="wrong")
    assert ran.code == 1
    assert "token 0 differs" in part(ran, "resend")["wrong"][0]


def test_no_hit_proves_nothing_and_server_without_faults_is_told(dix: Dix) -> None:
    ran = run(dix, cache="off")
    assert ran.code == 5
    assert "--debug-faults" in part(ran, "fault flip")["note"]
