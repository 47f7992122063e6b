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
    monkeypatch.setattr(cache_programme, "LENGTH_PAGES", (1, 3))


def run(dix: Dix, **options: Any) -> Any:
    with serving(**options) as server:
        return dix("check-cache", "--programme", "--port", server.port, "--max-tokens", 4, "--loops", 3, "--json")


def part(ran: Any, name: str) -> dict[str, Any]:
    return next(part for part in ran.json["parts"] if part["name"] == name)


def test_working_cache_passes_every_part_and_every_fault_is_noticed(dix: Dix) -> None:
    ran = run(dix, faulty=True)
    assert ran.code == 0
    assert all(not part["wrong"] for part in ran.json["parts"])
    for name in ("growth", "resend"):
        found = part(ran, name)
        assert 0 < found["hit_tokens"] <= found["possible_tokens"]
    lengths = part(ran, "lengths")
    assert lengths["prompts"] == 2 * 2 * 6  # the stand-in counts words, so every length can be had
    assert lengths["hit_tokens"] == lengths["possible_tokens"] > 0
    assert part(ran, "determinism")["prompts"] == 6
    assert part(ran, "reset")["prompts"] == 2
    assert [p["name"] for p in ran.json["parts"]][-4:] == ["fault flip", "fault drop", "fault short", "fault delay"]


@pytest.mark.parametrize(
    ("cache", "where", "words"),
    [
        ("blind", "fault flip", "unnoticed"),
        ("wrong", "resend", "token 0 differs"),
        ("miscounted", "resend", "its answers reported"),
        ("stubborn", "reset", "had been forgotten"),
    ],
)
def test_what_a_broken_cache_does_exits_1_and_is_named(dix: Dix, cache: str, where: str, words: str) -> None:
    ran = run(dix, faulty=cache == "blind", cache=cache)
    assert ran.code == 1
    assert words in part(ran, where)["wrong"][0]


def test_no_hit_proves_nothing_and_server_without_faults_is_told(dix: Dix) -> None:
    ran = run(dix, cache="off")
    assert ran.code == 5
    assert "--debug-faults" in part(ran, "fault flip")["note"]
