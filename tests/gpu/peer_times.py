"""What a layer's exchange costs on one GPU, without experts: `python -m tests.gpu.peer_times OUT`. Needs torch, nvcc and NCCL.

A rank that is its own peer, by collectives and through memory, at the released shapes: the cost of launches and waits without a link. Then
ranks that are streams of this process and really run at once: what flags and copies cost when nobody is far away. Recorded, 40 layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.distributed import GlooGroup
from engine.ops.peer_rows import PeerLayout, PeerMemory
from engine.ops.registry import select
from engine.parallel.expert_exchange import ExpertExchange, Route
from engine.parallel.peer_memory import MOST_ROWS, OpenPeers
from engine.parallel.placement import Placement
from engine.parallel.tensor_group import SoloTensors, TensorGroup

# Source: the released configuration.
EXPERTS, CHOSEN, HIDDEN, LAYERS = 384, 6, 5120, 40
ROWS, ROUNDS = (1, 2, 8, 32, 64, 128, 256), 20


class NoExperts:
    """Experts that cost one copy of their rows."""

    stores: ClassVar[list[Tensor]] = []

    def parts(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return x[:, None].expand(-1, slots.shape[1], -1).float()

    def summed(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return x.contiguous()

    def shared(self, x: Tensor) -> Tensor:
        return x

    def add_up(self, parts: Tensor, shared: Tensor) -> Tensor:
        return shared


class FixedPeers:
    """Memory that somebody else owns."""

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory

    def close(self) -> None:
        return None


class Member(SoloTensors):
    """A rank of a group that only says who it is."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def make_exchange(group: TensorGroup, route: Route, peers: Any = None) -> ExpertExchange:
    placement = Placement.initial(EXPERTS, 0, group.size)
    options: dict[str, Any] = {"exact": False, "device": "cuda", "hidden": HIDDEN, "dtype": torch.bfloat16, "num_chosen": CHOSEN}
    exchange = ExpertExchange(group, placement, LAYERS, LAYERS, route=route, peers=peers, beside=False, **options)
    for number in range(LAYERS):
        exchange.attach(number, NoExperts())
    return exchange


def layers(exchange: ExpertExchange, count: int) -> Callable[[], Tensor]:
    """All layers, rows of one from the one before, so that they cannot overlap."""
    draw = torch.Generator("cuda").manual_seed(count + exchange.group.rank)
    x = torch.randn(count, HIDDEN, device="cuda", generator=draw).bfloat16()
    ids = torch.rand(LAYERS, count, EXPERTS, device="cuda", generator=draw).argsort(2)[:, :, :CHOSEN].contiguous()
    weights = torch.rand(count, CHOSEN, device="cuda", generator=draw)

    def call() -> Tensor:
        exchange.restart(count)
        rows = x
        for number in range(LAYERS):
            rows = exchange.run(number, rows, ids[number], weights)
        return rows

    return call


def layout(ranks: int) -> PeerLayout:
    return PeerLayout.of(ranks, MOST_ROWS, HIDDEN, 2, CHOSEN, False)


def alone(group: GlooGroup) -> list[dict[str, Any]]:
    """us a layer of a rank that is its own peer."""
    tensors = group.split(1, "cuda")
    peers = OpenPeers(tensors, layout(1), 60.0)
    found = []
    for count in ROWS:
        row: dict[str, Any] = {"rows": count}
        for route in (Route.GATHER, Route.PEERS):
            call = layers(make_exchange(tensors, route, peers if route is Route.PEERS else None), count)
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
            row[f"{route}_us"] = microseconds(graph.replay)
            del graph
        found.append(row)
        print(json.dumps(row), flush=True)
    peers.close()
    return found


def streams(ranks: int) -> list[dict[str, Any]]:
    """us a layer when so many ranks run at once, each in its stream, on one GPU."""
    boxes = [torch.zeros(layout(ranks).num_bytes, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    addresses = tuple(box.data_ptr() for box in boxes)
    own = [torch.cuda.Stream() for _ in range(ranks)]
    found = []
    for count in ROWS:
        calls = [
            layers(
                make_exchange(Member(rank, ranks), Route.PEERS, FixedPeers(PeerMemory(rank, addresses, box, layout(ranks), 10.0))), count
            )
            for rank, box in enumerate(boxes)
        ]
        torch.cuda.synchronize()
        graphs = []
        for rank, call in enumerate(calls):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=own[rank], capture_error_mode="thread_local"):
                call()
            graphs.append(graph)

        def replay(graphs: list[torch.cuda.CUDAGraph] = graphs) -> list[None]:
            here = torch.cuda.current_stream()
            for stream, graph in zip(own, graphs, strict=True):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    graph.replay()
            for stream in own:
                here.wait_stream(stream)
            return []

        row = {"ranks": ranks, "rows": count, "peers_us": microseconds(replay)}
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def microseconds(replay: Callable[[], Any]) -> float:
    """Median time of a layer."""
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAYERS)
    return round(statistics.median(times[2:]), 2)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    select("auto", "cuda")
    (out / "meet").unlink(missing_ok=True)
    group = GlooGroup(0, 1, init_file=str(out / "meet"), timeout_s=60)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "alone": alone(group)}
    for ranks in (2, 4, 8):
        results[f"{ranks} streams"] = streams(ranks)
    results["seconds"] = round(time.monotonic() - began, 1)
    (out / "peer_times.json").write_text(json.dumps(results, indent=1))
    print("seconds", results["seconds"])
    sys.stdout.flush()
    group.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)
