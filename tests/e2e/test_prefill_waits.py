"""What a prompt of several chunks waits on a server of two ranks, counted in decode steps, and the simulator beside it."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from deepinfer_cli.tune.simulator import SimulatedGroup, StepCosts, Workload, simulate
from engine.prefill_gate import VoteRule
from tests.e2e.conftest import Dix, Server, start

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT, CHUNK, INTERVAL = 2000, 512, 100


def ask(server: Server, tokens: int) -> float:
    """A prompt that no cache knows, one token out. Returns the seconds that it took."""
    body = {"prompt": [20 + i % 900 for i in range(tokens)], "max_tokens": 1, "prefix_cache": {"read": False, "write": False}}
    began_s = time.monotonic()
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
    return time.monotonic() - began_s


def decode_steps(server: Server) -> int:
    time.sleep(1.2)  # ranks report twice a second
    rank: dict[str, Any] = server.metrics()["ranks"][0]
    return int(rank["steps_total"]) - int(rank["prompt_steps_total"])


@pytest.mark.parametrize("rule", [VoteRule.INTERVALS, VoteRule.REFERENCE])
def test_an_isolated_prompt_of_four_chunks_waits_as_many_steps_as_simulated(dix: Dix, rule: VoteRule) -> None:
    options = ("--prefill-any-interval", str(INTERVAL), "--set", f"engine.prefill_vote={rule.value}")
    server = start(dix, f"waits-{rule.value}", "--dp", "2", "--max-num-batched-tokens", str(CHUNK), *options)
    try:
        ask(server, 3)  # its prompt step begins the count anew
        before = decode_steps(server)
        seconds = ask(server, PROMPT)
        waited = decode_steps(server) - before
    finally:
        dix("stop", server.name, "--grace", "1s")
    costs = StepCosts(vote_s=0.001, decode_s=0.01, decode_row_s=0.0, prompt_s=0.02, prompt_token_s=0.0)
    group = SimulatedGroup(ranks=2, attempt=70, any_=INTERVAL, costs=costs, chunk_tokens=CHUNK, rule=rule)
    (request,) = simulate(Workload(PROMPT, 1, 1), group)
    print(f"{rule.value}: {waited} decode steps, {seconds:.2f} s")
    assert waited == request.waited_steps + request.paused_steps
    assert waited == (INTERVAL if rule is VoteRule.INTERVALS else 4 * INTERVAL)
