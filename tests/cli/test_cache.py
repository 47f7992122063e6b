"""`dix cache`: counters, explanations and reset against a small server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    for words in ("256 of 5 tokens", "256 (anchor)", "token 300", "tool 'search'", "'old words'", "'new words'"):
        assert words in ran.out
    assert plain["prompt_tokens"] == 2


def test_explain_wants_exactly_one_prompt(dix: Callable[..., Any]) -> None:
    assert dix("cache", "explain").code == 2
    assert dix("cache", "explain", "x.json", "--prompt", "x").code == 2


def test_reset_empties_the_server(dix: Callable[..., Any]) -> None:
    with serving() as server:
        ran = dix("cache", "reset", "--port", server.port)
        assert server.resets == 1
    assert ran.code == 0
