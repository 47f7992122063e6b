"""What clients that edit the middle of long prompts hit, by the simulator: without replay, and with both kinds.

    python -m tests.hicache.bench_edits [--tokens 8000] [--edits 4] [--traces]

Each of 60 prompts of random tokens is sent, then again with one token replaced, `--edits` times in a row; mean of three seeds. Prints hit
tokens as a share of what any cache could hit, and tokens left to compute. --traces: the recorded AgentX sessions of the tests instead.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from hicache.simulate import SimulatedCache, SimulationResult, TracePrompt, simulate, trace_prompts

TRACES = Path(__file__).parents[1] / "golden" / "agentx" / "traces"
ARENAS = (200, 500, 10_000)  # frames; the sessions together fill about 150


def edited(seed: int, num_tokens: int, edits: int) -> list[TracePrompt]:
    rng = random.Random(seed)
    prompts = []
    for _ in range(60):
        tokens = [rng.randrange(100_000) for _ in range(num_tokens)]
        prompts.append(TracePrompt(tokens))
        for _ in range(edits):
            tokens = list(tokens)
            tokens[rng.randrange(num_tokens)] = rng.randrange(100_000)
            prompts.append(TracePrompt(tokens))
    return prompts


def show_edits(num_tokens: int, edits: int) -> None:
    for interval in (16_384, 1_024):
        for mode in ("off", "bounded", "exact"):
            shape = SimulatedCache(100_000, replay=mode, state_interval_tokens=interval)
            results = [simulate(edited(seed, num_tokens, edits), shape) for seed in range(3)]
            shares = [result.share_of_oracle for result in results]
            computed = statistics.mean((r.prompt_tokens - r.hit_tokens) / r.requests for r in results)
            share = f"{statistics.mean(shares):6.1%} ({min(shares):.1%} to {max(shares):.1%})"
            print(f"states every {interval:6,} tokens, {mode:8} {share}, {computed:7,.0f} tokens computed a prompt")


def show_traces() -> None:
    for path in sorted(TRACES.glob("*.json")):
        prompts = list(trace_prompts(json.loads(path.read_text())))
        for frames in ARENAS:
            found: dict[str, SimulationResult] = {
                mode: simulate(prompts, SimulatedCache(frames, replay=mode)) for mode in ("off", "bounded", "exact")
            }
            hits = ", ".join(f"{mode} {result.hit_tokens:,}" for mode, result in found.items())
            print(f"{path.stem:16} {frames:6,} frames: hit tokens {hits} of {found['off'].oracle_tokens:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8_000)
    parser.add_argument("--edits", type=int, default=4)
    parser.add_argument("--traces", action="store_true")
    args = parser.parse_args()
    if args.traces:
        show_traces()
    else:
        show_edits(args.tokens, args.edits)


if __name__ == "__main__":
    main()
