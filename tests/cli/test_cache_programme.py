"""The programme of check-cache against servers whose cache works, lies, or notices nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_cli import cache_programme, live
from tests.cli.fake_server import serving

Dix = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LOOK_S", 0.001)
    monkeypatch.setattr(cache_programme, "DELAY_S", 0.05)
    monkeypatch.setattr(cache_programme, "GROWTH", (1, 24, 139, 300))
    monkeypatch.setattr(cache_programme, "LENGTH_PAGES", (1, 3))


def run(dix: Dix, *args: Any, **options: Any) -> Any:
    with serving(**options) as server:
        return dix("check-cache", "--programme", "--port", server.port, "--max-tokens", 4, "--loops", 3, "--json", *args)


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
    assert part(ran, "edits again")["hit_tokens"] > part(ran, "edits")["hit_tokens"]
    for name in ("tenants", "restart"):
        assert part(ran, name)["hit_tokens"] == part(ran, name)["possible_tokens"] > 0
    assert part(ran, "restart")["note"].endswith("pages taken over")
    assert [p["name"] for p in ran.json["parts"]][-4:] == ["fault flip", "fault drop", "fault short", "fault delay"]


@pytest.mark.parametrize(
    ("cache", "where", "words"),
    [
        ("blind", "fault flip", "unnoticed"),
        ("wrong", "resend", "token 0 differs"),
        ("miscounted", "resend", "its answers reported"),
        ("stubborn", "reset", "had been forgotten"),
        ("shared", "tenants", "that another one stored"),
        ("mortal", "restart", "tokens hit after the restart"),
    ],
)
def test_what_a_broken_cache_does_exits_1_and_is_named(
    dix: Dix, cache: str, where: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_programme, "PARTS", {where: cache_programme.PARTS[where]})
    ran = run(dix, faulty=cache in ("blind", "mortal"), cache=cache)
    assert ran.code == 1
    assert words in part(ran, where)["wrong"][0]


def test_no_hit_proves_nothing_and_server_without_faults_is_told(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("resend", "tenants", "restart", "fault flip")
    monkeypatch.setattr(cache_programme, "PARTS", {name: cache_programme.PARTS[name] for name in some})
    ran = run(dix, cache="off", tenants=False)
    assert ran.code == 5
    for name in ("fault flip", "restart"):
        assert "--debug-faults" in part(ran, name)["note"]
    assert "one tenant only" in part(ran, "tenants")["note"]


def test_answers_without_the_cache_can_come_from_another_server(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_programme, "PARTS", {name: cache_programme.PARTS[name] for name in ("resend", "tenants")})
    with serving() as reference:
        ran = run(dix, "--reference-url", reference.url)
        assert ran.code == 0
        assert ran.json["reference_url"] == reference.url
        assert {body["prefix_cache"] for body in reference.requests} == {False}
        assert sum(part["prompts"] for part in ran.json["parts"]) >= len(reference.requests) > 0


def test_reference_without_programme_is_refused(dix: Dix) -> None:
    with serving() as server:
        ran = dix("check-cache", "--port", server.port, "--reference-url", server.url)
    assert ran.code == 2
    assert "--programme" in ran.err
