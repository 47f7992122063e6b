"""kill -9 of a rank of a running server: what its host cache held hits again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from server.launch import segment_name
from tests.e2e.conftest import Dix, Server, kill, start, wait_until

pytestmark = pytest.mark.e2e


def ask(server: Server, number: int) -> Any:
    text = f"story {number} " + " ".join(f"word{number * i % 97}" for i in range(220))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, "thinking": {"type": "disabled"}}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120, headers={"X-Session-ID": str(number)}).json()


def segments(server: Server) -> list[Path]:
    state_dir = server.dix.state(server.name)["server_dir"]
    return sorted(Path("/dev/shm").glob(f"{segment_name(state_dir)}-r*"))


def test_killed_rank_finds_its_prefixes_again_and_stop_removes_the_memory(dix: Dix) -> None:
    server = start(dix, "revive", "--dp", "1")
    try:
        asked = [ask(server, number)["usage"] for number in range(6)]
        found = [ask(server, number)["usage"]["prompt_cache_hit_tokens"] for number in range(6)]
        assert all(found)
        memory = segments(server)
        assert [path.stat().st_mode & 0o777 for path in memory] == [0o600]
        kill(server.rank_pid(0))
        wait_until(
            "restart",
            lambda: (
                httpx.get(f"{server.url}/health/ready", timeout=5).status_code == 200 and server.metrics()["ranks"][0]["generation"] == 2
            ),
        )
        again = [ask(server, number)["usage"]["prompt_cache_hit_tokens"] for number in range(6)]
        assert sum(again) >= 0.95 * sum(found), f"{again} of {found}, prompts {[usage['prompt_tokens'] for usage in asked]}"
    finally:
        dix("stop", "revive", "--grace", "1s")
    assert not any(path.exists() for path in memory)


def test_kept_cache_hits_after_a_restart_of_the_whole_server(dix: Dix) -> None:
    server = start(dix, "keeper", "--dp", "1")
    ask(server, 1)
    memory = segments(server)
    dix.ok("stop", "keeper", "--grace", "1s", "--keep-cache")
    assert all(path.exists() for path in memory)
    server = start(dix, "keeper", "--dp", "1")
    try:
        assert ask(server, 1)["usage"]["prompt_cache_hit_tokens"] > 0
    finally:
        dix("stop", "keeper", "--grace", "1s")
    assert not any(path.exists() for path in memory)


def test_pages_on_disk_hit_after_the_server_was_stopped_and_started_again(dix: Dix) -> None:
    options = ("--dp", "2", "--set", "hicache.disk_gb=0.2")
    server = start(dix, "disk", *options)
    ask(server, 1)
    found = ask(server, 1)["usage"]["prompt_cache_hit_tokens"]
    memory = segments(server)
    logs = Path(dix.state("disk")["log_dir"])
    dix.ok("stop", "disk", "--grace", "1s")
    for rank in (0, 1):  # coupled ranks agree to leave, so each of them finishes its writing
        assert "left on disk" in (logs / f"rank-{rank}.log").read_text()
    assert not any(path.exists() for path in memory)
    server = start(dix, "disk", *options)
    try:
        hit = ask(server, 1)["usage"]["prompt_cache_hit_tokens"]
        wait_until("figures", lambda: server.metrics()["totals"]["prefix_cache"]["lookups_total"] == 1)
        record = max((rank["prefix_cache"] for rank in server.metrics()["ranks"]), key=lambda cache: cache["lookups_total"])
        assert hit == found > 0, (record["disk"], record["miss_total"], record["disk_errors_total"])
        assert record["tiers"]["disk"]["hit_tokens_total"] == found
        assert record["disk"]["bytes"] > 0
    finally:
        dix("stop", "disk", "--grace", "1s")
