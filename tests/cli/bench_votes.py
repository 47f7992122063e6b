"""What the rules for prompt steps do to simulated loads: `python -m tests.cli.bench_votes`. Seconds of CPU time, no GPU, no server.

Four ranks in lockstep, a minute of random arrivals, step times of a large model on GPUs (a decode step 14 ms, a prompt step of 8,192
tokens 256 ms): a simulation of scheduling, no measurement of hardware.
"""

from __future__ import annotations

import random

import numpy as np

from deepinfer_cli.tune.simulator import SimulatedGroup, StepCosts, Workload, simulate
from engine.prefill_gate import VoteRule

RANKS, SECONDS = 4, 60.0
COSTS = StepCosts(vote_s=0.0005, decode_s=0.014, decode_row_s=0.0001, prompt_s=0.010, prompt_token_s=0.00003)
RATES = {"short": 12.0, "mixed": 4.0, "long": 1.0}  # requests a second
SETTINGS = [
    (VoteRule.REFERENCE, 100),
    (VoteRule.INTERVALS, 100),
    (VoteRule.REFERENCE, 2),
    (VoteRule.INTERVALS, 2),
    (VoteRule.URGENT, 2),
]


def workload(kind: str, seed: int) -> Workload:
    """Prompts of up to 2,000 tokens, of 16,000 to 64,000, or 15 % of the latter among the former."""
    draw = random.Random(f"{kind}/{seed}")
    at_s, arrivals, trace = 0.0, [], []
    while (at_s := at_s + draw.expovariate(RATES[kind])) < SECONDS:
        arrivals.append(at_s)
        is_long = kind == "long" or (kind == "mixed" and draw.random() < 0.15)
        trace.append((draw.randint(16_000, 64_000) if is_long else draw.randint(100, 2_000), draw.randint(50, 400)))
    return Workload(0, 0, len(arrivals), tuple(arrivals), trace=tuple(trace))


def main() -> None:
    print(
        f"{'load':6} {'vote':10} {'any':>4} {'TTFT p50':>9} {'p99':>7} {'ITL p50':>8} {'p99':>6} {'TPOT p50':>9} {'p99':>6}   ms, seeds 1-3"
    )
    for kind in RATES:
        for rule, any_ in SETTINGS:
            requests = []
            for seed in (1, 2, 3):
                requests += simulate(workload(kind, seed), SimulatedGroup(RANKS, 70, any_, COSTS, rule=rule))
            ttft = np.array([request.ttft_s for request in requests])
            gaps = np.array([gap for request in requests for gap in request.gaps_s])
            tpot = np.array([sum(request.gaps_s) / len(request.gaps_s) for request in requests if request.gaps_s])
            row = [np.percentile(values, q) * 1e3 for values in (ttft, gaps, tpot) for q in (50, 99)]
            print(f"{kind:6} {rule.value:10} {any_:4} {row[0]:9.0f} {row[1]:7.0f} {row[2]:8.1f} {row[3]:6.0f} {row[4]:9.1f} {row[5]:6.1f}")


if __name__ == "__main__":
    main()
