"""`dix cache`: counters, explanations and reset against a small server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer_cli.commands.cache import disk_line, pages_line
from deepinfer_cli.commands.cache_explain import place_of
from deepinfer_cli.live import host_share
from tests.cli.fake_server import serving


def test_stats_show_counters_and_why_requests_missed(dix: Callable[..., Any]) -> None:
    with serving() as server:
        ran = dix("cache", "stats", "--port", server.port)
        document = dix("cache", "stats", "--port", server.port, "--json").json
    assert ran.code == 0
    assert "misses: short 3" in ran.out
    assert document["ranks"][0]["miss_total"]["short"] == 3


def test_explain_names_place_and_both_texts(dix: Callable[..., Any], tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"messages": [{"role": "user", "content": "a b c"}]}))
    with serving() as server:
        ran = dix("cache", "explain", body, "--port", server.port)
        plain = dix("cache", "explain", "--prompt", "a b", "--port", server.port, "--json").json
    assert ran.code == 0
    words_of_both = ("'old words'", "'new words'")
    for words in ("256 of 5 tokens", "256 (anchor)", "no state at 384", "approximately", "token 300", "tool 'search'", *words_of_both):
        assert words in ran.out
    assert plain["prompt_tokens"] == 2


def test_a_place_is_named_also_where_there_is_no_turn() -> None:
    assert place_of({"turn": 2, "opened_by": "<user>"}) == "in turn 2 (<user>)"
    assert place_of({"turn": 0, "opened_by": ""}) == "before the first turn"
    assert place_of({"turn": 1, "opened_by": "<s>", "tool": "search"}) == "in tool 'search'"


def test_explain_wants_exactly_one_prompt(dix: Callable[..., Any]) -> None:
    assert dix("cache", "explain").code == 2
    assert dix("cache", "explain", "x.json", "--prompt", "x").code == 2


def test_reset_empties_the_server(dix: Callable[..., Any]) -> None:
    with serving() as server:
        ran = dix("cache", "reset", "--port", server.port)
        assert server.resets == 1
    assert ran.code == 0


def test_pages_out_of_the_ordinary_are_one_line_and_ordinary_ones_none() -> None:
    def rank(high: int, low: int, beyond: int) -> dict[str, Any]:
        return {"prefix_cache": {"priority_pages": {"high": high, "default": 7, "low": low}, "pages_unreachable": beyond}}

    assert pages_line([rank(1000, 0, 2), rank(200, 0, 1)]) == "pages: 1,200 of high priority · 3 beyond the last state"
    assert pages_line([rank(0, 5, 0)]) == "pages: 5 of low priority"
    assert pages_line([rank(0, 0, 0), {}]) == ""


def test_what_lies_on_disk_is_one_line_a_rank_and_absent_frames_are_not_used_ones() -> None:
    disk = {"bytes": 3 * 2**29, "pages": 1200, "states": 7, "full": 1, "loads_total": 3}
    cache = {"disk": disk, "tiers": {"disk": {"hit_tokens_total": 4096}}, "frames": {"free": 3, "page": 1, "absent": 96}}
    line = disk_line({"rank": 1, "prefix_cache": cache})
    assert line == "disk of rank 1: 1.50 GiB · 1,200 pages, 7 states · 3 loads, 4,096 hit tokens · full"
    assert disk_line({"rank": 0, "prefix_cache": {"disk": {}}}) == ""
    assert host_share([{"prefix_cache": cache}]) == 0.25
