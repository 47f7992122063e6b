"""The front's memory of answers stops growing at `server.sampled_ids_mb`, however many conversations with tool calls there are."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from pathlib import Path

from engine.tokenizer import Tokenizer
from server.sampled_ids import SampledIds
from server.turn_memory import Turn, TurnMemory
from tests.server.harness import write_model_dir


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
