"""One rank is killed, stopped or hangs under load, at random points: no request is lost without an error, the group serves again."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Dix, Server, alive, kill, start, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]
CLIENTS = 6
BOUND_S = 15.0
# Of an answer on a machine that does ten other things: no bound on the server, that is BOUND_S after the loss.
PATIENCE_S = 240.0
KILLS_PER_SERVER = 2  # a third one within ten minutes is answered with a pause of 30 s
# Independent ranks, and ranks that need each other in every layer.
LAYOUTS = (("--dp", "2"), ("--dp", "2", "--cp", "2", "--ep", "2"))


@dataclass
class Outcome:
    """One request. kind: whole, error (the server said so), or what went wrong."""

    began_s: float
    kind: str = ""
    ended_s: float = 0.0


@dataclass
class Load:
    """Clients that send random requests one after the other until they are told to stop."""

    url: str
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for number in range(CLIENTS):
            thread = threading.Thread(target=self._client, args=(random.Random(f"{self.seed}/{number}"),), daemon=True)
            thread.start()
            self.threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(PATIENCE_S + 30)
            assert not thread.is_alive(), "a client still waits"

    def _client(self, draw: random.Random) -> None:
        while not self.stop.is_set():
            outcome = Outcome(time.monotonic())
            self.outcomes.append(outcome)
            prompt = [draw.randrange(20, 900) for _ in range(draw.choice([3, 40, 300, 700]))]
            body = {"prompt": prompt, "max_tokens": draw.randrange(1, 60), "ignore_eos": True, "stream": draw.random() < 0.6}
            try:
                outcome.kind = ask(f"{self.url}/v1/completions", body)
            except httpx.HTTPError as error:
                outcome.kind = f"broken: {error!r}"
            outcome.ended_s = time.monotonic()
            if outcome.kind == "error":
                time.sleep(0.2)


def ask(url: str, body: dict[str, Any]) -> str:
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as reply:
        if not body["stream"]:
            answer = httpx.Response(reply.status_code, content=reply.read()).json()
            if reply.status_code == 200:
                return "whole" if answer["choices"][0]["finish_reason"] == "length" else f"odd end: {answer['choices']}"
            return "error" if reply.status_code >= 500 and answer["error"]["message"] else f"odd status {reply.status_code}"
        if reply.status_code != 200:
            return "error" if reply.status_code >= 500 else f"odd status {reply.status_code}"
        lines = list(reply.iter_lines())
    if "event: error" in lines:
        return "error" if "data: [DONE]" not in lines else "both an error and an end"
    return "whole" if "data: [DONE]" in lines else f"cut: {lines[-2:]}"


def fell_asleep(server: Server, rank: int) -> None:
    """Its loop does nothing any more, while the process lives and beats."""
    assert httpx.post(f"{server.url}/deepinfer/debug/fault", json={"kind": "hang", "rank": rank}, timeout=30).status_code == 200


def was_killed(server: Server, rank: int) -> None:
    kill(server.rank_pid(rank))


def was_stopped(server: Server, rank: int) -> None:
    os.kill(server.rank_pid(rank), signal.SIGSTOP)


def lose_once(server: Server, draw: random.Random, lose: Callable[[Server, int], None] = was_killed) -> None:
    """Load, the loss of a rank somewhere in it, and everything that must hold afterwards."""
    with Load(server.url, draw.randrange(10**9)) as load:
        wait_until("the load runs", lambda: sum(outcome.kind == "whole" for outcome in load.outcomes) >= 3, 150)
        time.sleep(draw.uniform(0.0, 1.5))
        lost_s = time.monotonic()
        lose(server, draw.randrange(2))
        time.sleep(1.0)
    touched = [outcome for outcome in load.outcomes if outcome.ended_s >= lost_s]
    assert {outcome.kind for outcome in load.outcomes} <= {"whole", "error"}, [
        o.kind for o in load.outcomes if o.kind not in ("whole", "error")
    ]
    assert any(outcome.kind == "error" for outcome in touched), "nobody noticed"
    assert max(outcome.ended_s for outcome in touched) - lost_s < BOUND_S
    wait_until("the group serves again", lambda: httpx.get(f"{server.url}/health/ready").status_code == 200, 300)
    assert ask(f"{server.url}/v1/completions", {"prompt": [50, 51], "max_tokens": 3, "ignore_eos": True, "stream": False}) == "whole"
    requests = server.metrics()["requests"]
    assert (requests["active"], requests["queued"], requests["streams_open"]) == (0, 0, 0)


def kill_many(dix: Dix, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(0, kills, KILLS_PER_SERVER):
        server = start(dix, "killed", *LAYOUTS[number // KILLS_PER_SERVER % len(LAYOUTS)])
        try:
            for _ in range(min(KILLS_PER_SERVER, kills - number)):
                lose_once(server, draw)
        finally:
            processes = dix.processes("killed")
            dix("stop", "killed", "--grace", "1s")
        wait_until("all processes are gone", lambda left=processes: not alive(left), 15)  # type: ignore[misc]


def test_five_kills_under_load(dix: Dix) -> None:
    kill_many(dix, 5, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("lose", [was_stopped, fell_asleep])
def test_a_rank_that_hangs_is_noticed_as_soon(dix: Dix, lose: Callable[[Server, int], None]) -> None:
    """Its peer waits for it in a collective, whose limit is longer, and is not blamed."""
    server = start(dix, "hangs", *LAYOUTS[0], "--ep", "2", "--debug-faults")
    try:
        draw = random.Random(3)
        rank = draw.randrange(2)
        lose_once(server, draw, lambda server, _rank: lose(server, rank))
        assert dix.state("hangs")["last_failure"].startswith(f"rank {rank} hangs")
    finally:
        dix("stop", "hangs", "--grace", "1s")


@pytest.mark.slow
def test_fifty_kills_under_load(dix: Dix) -> None:
    kill_many(dix, 50, seed=2)
