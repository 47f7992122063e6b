"""Starting, stopping and killing: nothing survives, nothing hangs, a second start works at once."""

from __future__ import annotations

import threading
import time

import httpx
import psutil
import pytest

from tests.e2e.conftest import Dix, Server, alive, kill, start, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def open_stream(url: str, lines: list[str], first: threading.Event) -> None:
    """Read a long stream to its end, however it ends."""
    body = {
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 4000,
        "min_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                if line.startswith("data:") and len(lines) > 4:
                    first.set()
    except httpx.HTTPError as error:
        lines.append(f"broken: {error!r}")


def test_killing_a_rank_fails_all_open_requests_and_the_group_restarts(dix: Dix) -> None:
    server = start(dix, "chaos", "--dp", "2")
    try:
        streams: list[list[str]] = [[], []]
        started = [threading.Event(), threading.Event()]
        threads = [threading.Thread(target=open_stream, args=(server.url, s, e)) for s, e in zip(streams, started, strict=True)]
        for thread in threads:
            thread.start()
        assert all(event.wait(60) for event in started)
        old = server.rank_pid(1)
        kill(old)
        killed = time.monotonic()
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - killed < 3.0
        for lines in streams:
            assert "event: error" in lines, lines[-3:]
            assert "data: [DONE]" not in lines
        assert dix.json("status", "chaos")["servers"][0]["state"] != "ready"
        wait_until("the group is ready again", lambda: httpx.get(f"{server.url}/health/ready").status_code == 200, 120)
        assert server.rank_pid(1) != old
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}, timeout=60
        )
        assert answer.status_code == 200
    finally:
        processes = dix.processes("chaos")
        dix.ok("stop", "chaos", "--grace", "1s")
    wait_until("all processes are gone", lambda: not alive(processes), 10)


def test_killing_the_supervisor_ends_everything_and_a_second_start_works_at_once(dix: Dix) -> None:
    first = start(dix, "twice", "--dp", "2")
    processes = dix.processes("twice")
    assert len(processes) >= 4
    kill(dix.state("twice")["supervisor"]["pid"])
    wait_until("all processes are gone", lambda: not alive(processes), 10)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{first.url}/health")
    second = start(dix, "twice", "--dp", "1")
    assert httpx.get(f"{second.url}/health").status_code == 200
    processes = dix.processes("twice")
    dix.ok("stop", "twice", "--grace", "1s")
    wait_until("all processes are gone", lambda: not alive(processes), 10)


def test_a_port_in_use_is_exit_code_3_and_names_the_owner(dix: Dix, server: Server) -> None:
    done = dix("start", "tiny", "--name", "other", "--port", str(server.port))
    assert done.returncode == 3
    assert str(server.port) in done.stderr
    assert "e2e" in done.stderr


def test_one_rank_of_the_embedded_model_stays_below_700_mb(server: Server) -> None:
    for rank in (0, 1):
        assert psutil.Process(server.rank_pid(rank)).memory_info().rss < 700e6
