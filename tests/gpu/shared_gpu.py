"""Ranks that are processes on one GPU, which take turns on it and reach each other's memory: `python -m tests.gpu.shared_gpu OUT`.

What NCCL refuses on one device goes over gloo, by way of the host. Trips of rows against collectives, eager and recorded; then a small
model in the released formats, whose steps must have the bits of a rank with all experts where rows are batch-invariant, recorded or not;
then whether the memory is given back. Slow, and no time means anything. `--device cpu` tries all but the memory itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch, StepKind
from engine.config import EngineConfig
from engine.distributed import GlooGroup
from engine.model_runner import ModelRunner
from engine.ops.peer_rows import bring_parts, bring_sums, send_rows
from engine.ops.registry import select
from engine.parallel.peer_memory import OpenPeers
from engine.parallel.tensor_group import Piece, TensorGroup, split_group
from tests.gpu.ranks import rank_command, rank_options, run_together
from tests.models.golden import GOLDEN, PROMPTS, Seq
from tests.parallel.peer_trips import Shape, Trip, add, check_home, draw_trips, terms

STEPS, ROUNDS = 6, 5
SPARE_BYTES = 16 << 20  # of the GPU's memory that may stay taken


class StagedTensors:
    """A `TensorGroup` for tensors of a device that NCCL does not take twice."""

    def __init__(self, host: TensorGroup) -> None:
        self.rank, self.size = host.rank, host.size
        self.max, self.gather_ints = host.max, host.gather_ints
        self._host = host

    def all_gather(self, out: Tensor, mine: Tensor) -> None:
        staged = torch.empty(out.shape, dtype=out.dtype)
        self._host.all_gather(staged, mine.cpu())
        out.copy_(staged)

    def all_to_all(self, out: Tensor, mine: Tensor) -> None:
        staged = torch.empty(out.shape, dtype=out.dtype)
        self._host.all_to_all(staged, mine.cpu())
        out.copy_(staged)

    def all_reduce(self, tensor: Tensor) -> None:
        staged = tensor.cpu()
        self._host.all_reduce(staged)
        tensor.copy_(staged)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        staged = tensor.cpu()
        self._host.broadcast(staged, source)
        tensor.copy_(staged)

    def swap(self, sends: list[Piece], receives: list[Piece]) -> None:
        staged = [(torch.empty(target.shape, dtype=target.dtype), peer) for target, peer in receives]
        self._host.swap([(tensor.cpu(), peer) for tensor, peer in sends], staged)
        for (target, _), (got, _) in zip(receives, staged, strict=True):
            target.copy_(got)


class SharedGpuGroup(GlooGroup):
    """A group whose ranks have one GPU between them."""

    def split(self, size: int, device: str) -> TensorGroup:
        host = split_group(self.rank, self.size, size, "cpu", self.timeout_s, self.waits)
        return StagedTensors(host) if device == "cuda" else host


class Trips:
    """Trips of one shape in shared memory."""

    def __init__(self, group: SharedGpuGroup, exact: bool) -> None:
        self.rank, tensors = group.rank, group.split(group.size, "cuda")
        self.shape = Shape(group.size, 6, 5120, torch.bfloat16, exact, True, most_rows=64)
        self.peers = OpenPeers(tensors, self.shape.layout, 60.0)
        self.trips = list(draw_trips(self.shape, [1, 8, 64, 3], [64, 0, 1, 5, 64], "cuda"))

    def whole(self, trip: Trip) -> Tensor | None:
        memory, shared = self.peers.memory, trip.shared[self.rank]
        sent = send_rows(*trip.given(self.rank), memory)
        parts = terms(sent.rows, sent.slots, sent.weights, self.rank)
        if self.shape.exact:
            return bring_parts(parts, sent, memory).clone()
        return bring_sums(add(parts, self.shape.dtype), sent, shared if len(shared) else None, memory)

    def check(self, results: list[Tensor | None]) -> None:
        torch.cuda.synchronize()
        for trip, got in zip(self.trips, results, strict=True):
            check_home(got, trip.home(self.rank))

    def run(self) -> None:
        for _ in range(ROUNDS):
            self.check([self.whole(trip) for trip in self.trips])
        graph = torch.cuda.CUDAGraph()
        recorded: list[Tensor | None] = []
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            recorded[:] = [self.whole(trip) for trip in self.trips]
        for turn in range(ROUNDS):
            for trip in self.trips:
                for x in trip.x:
                    x.mul_(-0.5)
            graph.replay()
            self.check(recorded)
            if turn == 1:  # eager trips in between count on
                self.check([self.whole(trip) for trip in self.trips])
        del graph
        self.peers.close()


def logits_of(runner: ModelRunner, group: GlooGroup) -> list[Tensor]:
    """Of a prompt and of decode steps in which one rank may have nothing to do, with other rows on every rank."""
    count = 1 + 2 * group.rank % 3
    seqs = [Seq(runner, PROMPTS[3], slot) for slot in range(1, 1 + count)]
    logits = [runner.run(Batch(StepKind.PREFILL, [seq.slice(40 + slot) for slot, seq in enumerate(seqs)])).clone()]
    for step in range(STEPS):
        if group.rank == 1 and step % 3 == 1:
            runner.join(StepKind.DECODE)
        else:
            logits.append(runner.run(Batch(StepKind.DECODE, [seq.slice(seq.done + 1) for seq in seqs])).clone())
    return logits


def model_steps(group: SharedGpuGroup, device: str, report: dict[str, Any]) -> None:
    """Bits by memory of peers against those by collectives, and how far both are from a rank with all experts."""
    cuda = device == "cuda"
    sizes: dict[str, Any] = {"block_size": 128, "num_blocks": 21, "max_num_seqs": 4, "max_model_len": 600, "num_draft_tokens": 0}
    for invariant in (True, False):
        kept: dict[str, list[Tensor]] = {}
        for name, ep, exchange in (
            ("alone", 1, "auto"),
            ("gather", group.size, "gather"),
            ("peers", group.size, "peers" if cuda else "auto"),
        ):
            config = EngineConfig(
                model=str(GOLDEN / "tiny-a-fp8"), device=device, precision="B", dp=group.size, ep=ep, expert_exchange=exchange,
                batch_invariant=invariant, enforce_eager=name == "gather" or not cuda, **sizes,
            )  # fmt: skip
            runner = ModelRunner(config, group=group)
            report.setdefault("paths", {})[f"{name} {invariant}"] = runner.path
            assert runner.path == "graphs" or config.enforce_eager, runner.path
            kept[name] = logits_of(runner, group)
            if name == "peers":
                runner.drop_recordings()
                kept["peers eager"] = logits_of(runner, group)
            runner.close()
        for name in ("gather", "peers", "peers eager"):
            change = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(kept["alone"], kept[name], strict=True))
            same = all(torch.equal(a, b) for a, b in zip(kept["alone"], kept[name], strict=True))
            report.setdefault("against_alone", {})[f"{name}, {'invariant' if invariant else 'free'}"] = {
                "change": change,
                "same_bits": same,
            }
        for name in ("peers", "peers eager"):
            same = all(torch.equal(a, b) for a, b in zip(kept["gather"], kept[name], strict=True))
            report.setdefault("same_bits_as_gather", {})[f"{name}, {'invariant' if invariant else 'free'}"] = same
            assert same or (name == "peers" and not invariant), f"{name} differs from gather, {report}"


def run_rank(rank: int, options: argparse.Namespace) -> None:
    cuda = options.device == "cuda"
    select("auto", options.device)
    group = SharedGpuGroup(rank, options.ranks, init_file=options.meeting, timeout_s=60)
    report: dict[str, Any] = {}
    if cuda:
        for exact in (False, True):
            Trips(group, exact).run()
        torch.cuda.empty_cache()
        group.max([0])
        before = torch.cuda.mem_get_info()[0]
        for _ in range(3):
            Trips(group, False).peers.close()
            torch.cuda.empty_cache()
        group.max([0])
        report["bytes_not_given_back"] = before - torch.cuda.mem_get_info()[0]
        assert report["bytes_not_given_back"] < SPARE_BYTES, report
        print(rank, "trips are right", report, flush=True)
    model_steps(group, options.device, report)
    (options.out / f"rank-{rank}.json").write_text(json.dumps(report, indent=1))
    print(rank, json.dumps(report), flush=True)
    group.close()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = rank_options(argparse.ArgumentParser())
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.rank >= 0:
        return run_rank(options.rank, options)
    options.out.mkdir(parents=True, exist_ok=True)
    meeting = options.out / f"meeting-{os.getpid()}"
    shape = ["--ranks", str(options.ranks)]
    ranks = [rank_command("tests.gpu.shared_gpu", options, rank, options.out, meeting) for rank in range(options.ranks)]
    codes = run_together([[*rank, *shape] for rank in ranks])
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
