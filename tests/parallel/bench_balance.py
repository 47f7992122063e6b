"""What an uneven load costs and what balancing recovers, by CPU time: `python -m tests.parallel.bench_balance [--ranks 4]`.

Processes share the experts of a few layers over gloo and wait for each other without spinning, so a rank's CPU time is its work, and a step
lasts as long as the rank with most of it. Phases are measured in turns on every rank: even routing, the first rank at RATIO times the
mean, and the same load behind the balancer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch

from engine.distributed import GlooGroup
from engine.models.moe import MoE
from engine.parallel.balancer import Balancer, BalanceSettings
from engine.parallel.expert_exchange import ExpertExchange, Route
from engine.parallel.forced_routing import ForcedRouting
from engine.parallel.placement import Placement

EXPERTS, CHOSEN, HIDDEN, INNER, LAYERS, ROWS, ROUNDS = 32, 4, 256, 512, 3, 384, 7
TEXT: Any = SimpleNamespace(gate_temp=1.0, routed_scaling_factor=2.5, swiglu_limit=10.0, n_routed_experts=EXPERTS)


class Rank:
    def __init__(self, rank: int, ranks: int, meeting: str) -> None:
        torch.set_num_threads(1)
        self.group = GlooGroup(rank, ranks, init_file=meeting, timeout_s=300)
        self.tensors = self.group.split(ranks, "cpu")
        self.rank, self.ranks = rank, ranks
        draw = torch.Generator().manual_seed(rank)
        self.inputs = [torch.randn(ROWS, HIDDEN, generator=draw) for _ in range(LAYERS)]

    def exchange(self, ratio: float) -> ExpertExchange:
        """Layers of random weights, routed so that the first rank gets `ratio` times the mean."""
        placement = Placement.initial(EXPERTS, 0, self.ranks)
        exchange = ExpertExchange(
            self.tensors, placement, LAYERS, LAYERS, exact=False, route=Route.GATHER, device="cpu", hidden=HIDDEN, dtype=torch.float32,
            num_chosen=CHOSEN,
        )  # fmt: skip
        exchange.forced = ForcedRouting(ratio, self.ranks, len(placement.held_by(0)), EXPERTS)
        held = [*placement.held_by(self.rank), EXPERTS]
        for number in range(LAYERS):
            draw = torch.Generator().manual_seed(number)
            w13, w2 = (torch.randn(EXPERTS + 1, *shape, generator=draw) / 16 for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
            gate, zeros = torch.randn(EXPERTS, HIDDEN, generator=draw), torch.zeros(EXPERTS)
            exchange.attach(number, MoE(gate, zeros, zeros, w13[held], w2[held], CHOSEN, TEXT, False, exchange))
        return exchange

    def step(self, exchange: ExpertExchange) -> float:
        """CPU seconds of this rank."""
        exchange.begin(ROWS, ROWS)
        began = time.process_time()
        for number, x in enumerate(self.inputs):
            exchange.layers[number].experts[0](x, number)  # type: ignore[operator]
        took = time.process_time() - began
        exchange.finish()
        return took

    def busiest(self, seconds: float) -> float:
        return self.group.max([int(seconds * 1e9)])[0] / 1e9

    def run(self, ratio: float) -> dict[str, float]:
        phases = {"even": self.exchange(1.0), "uneven": self.exchange(ratio), "balanced": self.exchange(ratio)}
        balancer = Balancer(phases["balanced"], BalanceSettings(interval=8, window=4, report=4))
        for _ in range(8 + LAYERS):
            self.step(phases["balanced"])
            balancer.end_step(False)
        phases["balanced"].counting = False
        times: dict[str, list[float]] = {name: [] for name in phases}
        for _ in range(ROUNDS):
            for name, exchange in phases.items():
                times[name].append(self.busiest(self.step(exchange)))
        result = {f"{name}_ms": statistics.median(values) * 1e3 for name, values in times.items()}
        return result | {"balance": balancer.figures.balance, "moved_bytes": balancer.figures.moved_bytes}


def rank_main(rank: int, ranks: int, ratio: float, meeting: str) -> None:
    one = Rank(rank, ranks, meeting)
    result = one.run(ratio)
    if rank == 0:
        even = result["even_ms"]
        for name in ("even", "uneven", "balanced"):
            took = result[f"{name}_ms"]
            print(f"{name:>9}: {took:7.1f} ms of CPU on the busiest of {ranks} ranks, {even / took:5.0%} of the even throughput")
        print(f"balance behind the plan {result['balance']:.3f} (before: {ratio:g})")
    one.group.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=1.8)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (options.ranks, options.ratio, f"{scratch}/meeting")
        ranks = [spawn.Process(target=rank_main, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
