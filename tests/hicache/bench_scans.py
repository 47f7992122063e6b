"""What the choices against one-off prompts gain and cost, by the simulator: eviction, store threshold, and the place of large prompts.

    python -m tests.hicache.bench_scans [--seeds 3]

Workloads: `sessions`, the recorded AgentX sessions of the tests, a dozen at a time out of sixty copies; `scans`, those and as many one-off
prompts that fill a third of the arena; `crowd`, those and four times as many short one-off prompts; `returning`, one-off prompts that all
come a second time, once; `shared`, no sessions but questions asked once below one of eighty system prompts; `large`, three sessions at a
time that begin with prompts of 28 % of the arena. Prints hit tokens as a share of what any cache could hit (mean of the seeds), by frames
of the arena.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from hicache.simulate import SimulatedCache, TracePrompt, simulate, trace_prompts

TRACES = Path(__file__).parents[1] / "golden" / "agentx" / "traces"
ARENAS = (250, 500, 1_000)  # frames; the dozen sessions together fill about 800, states included
AT_ONCE, COPIES = 12, 12
CHOICES: dict[str, dict[str, object]] = {
    "lru": {"scan_share": 1.0},
    "lru, large ones first": {"scan_share": 0.25},
    "slru": {"eviction": "slru", "scan_share": 1.0},
    "slru, large ones first": {"eviction": "slru", "scan_share": 0.25},
    "lru, second sight": {"store_threshold": 2, "scan_share": 1.0},
    "lru, second sight, large ones first": {"store_threshold": 2, "scan_share": 0.25},
}


def one_off(rng: random.Random, num_tokens: int) -> TracePrompt:
    return TracePrompt([rng.randrange(2**31) for _ in range(num_tokens)])


def sessions(rng: random.Random) -> Iterator[TracePrompt]:
    """Turns of a dozen recorded sessions in turn."""
    waiting: list[list[TracePrompt]] = []
    for path in sorted(TRACES.glob("*.json")):
        for number in range(COPIES):
            document = copy.deepcopy(json.loads(path.read_text()))
            document.update(id=f"{document['id']}-{number}", hash_id_scope="local")
            waiting.append(list(trace_prompts(document))[::-1])
    rng.shuffle(waiting)
    return in_turn(rng, waiting, AT_ONCE)


def in_turn(rng: random.Random, waiting: list[list[TracePrompt]], at_once: int) -> Iterator[TracePrompt]:
    """Turns of some sessions, each with its last turn first; where one ends the next begins."""
    running = [waiting.pop() for _ in range(at_once)]
    while running:
        at = rng.randrange(len(running))
        yield running[at].pop()
        if not running[at]:
            running.pop(at)
            if waiting:
                running.append(waiting.pop())


def mixed(rng: random.Random, share: float, num_tokens: int) -> list[TracePrompt]:
    """The sessions, and after a turn `share` one-off prompts on average."""
    prompts: list[TracePrompt] = []
    for turn in sessions(rng):
        prompts.append(turn)
        prompts += [one_off(rng, num_tokens) for _ in range(int(share) + (rng.random() < share % 1))]
    return prompts


def returning(rng: random.Random, num_tokens: int) -> list[TracePrompt]:
    """Sessions, and one-off prompts that come a second time twenty turns later."""
    prompts: list[TracePrompt] = []
    late: list[TracePrompt] = []
    for turn in sessions(rng):
        late.append(one_off(rng, num_tokens))
        prompts += [turn, late[-1], *([late.pop(0)] if len(late) > 20 else [])]
    return prompts


def shared(rng: random.Random) -> list[TracePrompt]:
    """A few system prompts are in demand, most are not, and every question is new."""
    texts = [[rng.randrange(2**31) for _ in range(2_000)] for _ in range(80)]
    demand = [1 / (place + 1) for place in range(len(texts))]
    chosen = rng.choices(texts, demand, k=1_500)
    return [TracePrompt(text + [rng.randrange(2**31) for _ in range(rng.randrange(200, 900))], len(text)) for text in chosen]


def large(rng: random.Random, frames: int, at_once: int = 3) -> list[TracePrompt]:
    """Sessions too large for the arena, which grow by 1,200 tokens a turn."""
    waiting = []
    for _ in range(4 * at_once):
        tokens = [rng.randrange(2**31) for _ in range(frames * 28 // 100 * 128 + 8 * 1_200)]
        waiting.append([TracePrompt(tokens[: len(tokens) - 1_200 * turns]) for turns in range(1, 9)])
    return list(in_turn(rng, waiting, at_once))


WORKLOADS: dict[str, Callable[[random.Random, int], list[TracePrompt]]] = {
    "sessions": lambda rng, frames: list(sessions(rng)),
    "scans": lambda rng, frames: mixed(rng, 0.1, frames // 3 * 128),
    "crowd": lambda rng, frames: mixed(rng, 4, 600),
    "returning": lambda rng, frames: returning(rng, 600),
    "shared": lambda rng, frames: shared(rng),
    "large": large,
    "large, four at a time": lambda rng, frames: large(rng, frames, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for workload, make in WORKLOADS.items():
        found: dict[str, list[str]] = {name: [] for name in CHOICES}
        for frames in ARENAS:
            traces = [make(random.Random(seed), frames) for seed in range(args.seeds)]
            for name, options in CHOICES.items():
                shares = [simulate(trace, SimulatedCache(frames, **options)).share_of_oracle for trace in traces]  # type: ignore[arg-type]
                found[name].append(f"{statistics.mean(shares):6.1%}")
        print(f"{workload}: frames {', '.join(map(str, ARENAS))}")
        for name, cells in found.items():
            print(f"  {name:36} {' '.join(cells)}")


if __name__ == "__main__":
    main()
