"""The A/B proof on a live server: it passes on a sound cache and fails on a damaged one."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_sound_cache_gives_the_same_tokens_and_the_predicted_hits(server: Server) -> None:
    report = server.dix.json("check-cache", "--port", str(server.port), "--turns", "3")
    turns = report["turns"]
    assert [t["cached_tokens"] for t in turns] == [t["predicted_tokens"] for t in turns]
    assert sum(t["cached_tokens"] > 0 for t in turns) >= 2


def test_a_flipped_byte_of_a_stored_page_is_found(server: Server) -> None:
    first = server.dix("check-cache", "--port", str(server.port), "--turns", "2", "--seed", "77")
    assert first.returncode == 0, first.stderr
    for rank in (0, 1):
        httpx.post(f"{server.url}/deepinfer/debug/fault", json={"kind": "flip", "rank": rank}, timeout=30)
    again = server.dix("check-cache", "--port", str(server.port), "--turns", "2", "--seed", "77")
    assert again.returncode == 1, again.stdout + again.stderr


def test_a_server_that_is_not_there_is_exit_code_4(server: Server) -> None:
    done = server.dix("check-cache", "--port", "1", "--turns", "2")
    assert done.returncode == 4
    assert done.stderr.startswith("error:")
