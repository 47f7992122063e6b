"""The front's memory of answers stops growing at `server.sampled_ids_mb`, however many conversations with tool calls there are."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.tokenizer import Tokenizer
from server.sampled_ids import SampledIds
from server.turn_memory import Turn, TurnMemory
from tests.server.harness import FakeServer, finish, start_fake, write_model_dir
from tests.server.test_sampled_ids import letters

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"day": {"type": "string"}}}}}
PARAMETER = '<｜DSML｜ parameter name="day" string="true">{day}</｜DSML｜ parameter>'
CALL = f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n{PARAMETER}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'


def test_six_thousand_turns_take_no_more_than_the_first_that_filled_the_memories(tmp_path: Path) -> None:
    tokenizer, bound = Tokenizer.from_dir(write_model_dir(tmp_path)), 2**18
    spelled = {char: tokenizer.encode_plain(char) for char in "conversation 0123456789"}  # as no tokenizer with merges would split it
    turns, sampled = TurnMemory(bound), SampledIds(bound)
    taken, kept = [], []
    tracemalloc.start()
    for number in range(6_000):
        ids = [i for char in f"conversation {number}" for i in spelled[char]]
        sampled.learn(tokenizer, "", ids)
        calls = (("weather", f'{{"day": "{number}"}}'),)
        turns.remember(Turn("", (f"call_{number:024}",), f"text {number}", f"because of {number}", calls, "<head>", array("I", ids)))
        if number % 1_000 == 999:
            gc.collect()
            taken.append(tracemalloc.get_traced_memory()[0])
            kept.append(len(turns) + len(sampled))
    tracemalloc.stop()
    assert max(kept) < 1.02 * min(kept) < 2_000, f"full long before the end: {kept}"
    assert max(taken) < 1.05 * min(taken), taken
    assert max(taken) < 2 * 2 * bound, "and not far from what was asked for"


def converse(server: FakeServer, client: httpx.Client, number: int) -> None:
    """A turn with a call that no other conversation has, and the turn behind it."""
    spelled = letters(server.tokenizer, f"Thought number {number} of many")
    assert server.tokenizer.eos_id is not None
    server.script([*spelled, *server.tokenizer.encode(f"</think>\n\n{CALL.format(day=number)}"), server.tokenizer.eos_id])
    talk: list[dict[str, Any]] = [{"role": "user", "content": f"hello {number}"}]
    body = {"messages": talk, "tools": [TOOL], "thinking": {"type": "enabled"}}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]["message"]
    talk += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "42"}]
    client.post("/v1/chat/completions", json=body).raise_for_status()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_front_that_has_seen_five_thousand_conversations_grows_no_more() -> None:
    server = start_fake(sampled_ids_mb=1.0, router_mb=1.0, reattach_reasoning=True)
    try:
        front = psutil.Process(next(p.pid for p in server.state.processes if p.role == "front"))
        held: list[float] = []
        with httpx.Client(base_url=server.url, timeout=120) as client:
            for number in range(5_600):
                converse(server, client, number)
                if number % 400 == 399:
                    held.append(front.memory_full_info().uss / 2**20)
                    print(f"{number + 1} conversations: {held[-1]:.2f} MiB")
        # 2,000 conversations fill the memories and the tables of the router.
        assert held[-1] - held[4] < 1.0, held
    finally:
        finish(server)
