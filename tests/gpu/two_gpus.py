"""Shared experts on two GPUs: `python -m tests.gpu.two_gpus OUT_DIR`. Needs torch, numpy and nvcc.

One MoE block at the released shapes with random packed weights: that two ranks with half of the experts each give what one rank with all
gives; decode throughput of both over one; what dispatch and combine take, in forms whose outputs must have the same bits; what balancing
recovers when one expert gets eight times its share; two independent ranks over one. Decode times are those of recorded graphs. Then a small
model through the runner: recorded steps against eager ones, both with shared experts, in logits and in time. One JSON file per rank, a
table last.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.cuda_graph import NullRecorder
from engine.distributed import GlooGroup
from engine.errors import ConfigError
from engine.models.numerics import WideLinear
from engine.models.packed_layers import PackedMoE
from engine.ops.exchange_rows import ADD_RANK_SUMS, LOCAL_CHOICES, PACK_ROWS
from engine.ops.packed_experts import PackedExperts
from engine.ops.packed_weights import Format, PackedWeights
from engine.ops.peer_rows import PeerLayout
from engine.ops.registry import select
from engine.ops.route_experts import route_experts
from engine.parallel.balancer import Balancer, BalanceSettings
from engine.parallel.expert_exchange import ExpertExchange, Route
from engine.parallel.forced_routing import ForcedRouting
from engine.parallel.peer_memory import MOST_ROWS, OpenPeers, check_peers
from engine.parallel.placement import Placement
from tests.gpu.ranks import run_together

# Source: the released configuration.
EXPERTS, CHOSEN, HIDDEN, INNER = 384, 6, 5120, 2304
DEVICE, BATCHES = "cuda", (8, 64, 256)
if "--small" in sys.argv:  # the same code without GPUs and without meaning
    EXPERTS, HIDDEN, INNER, DEVICE, BATCHES = 16, 128, 64, "cpu", (2, 4, 8)
TEXT: Any = SimpleNamespace(gate_temp=1.0, routed_scaling_factor=2.5, swiglu_limit=10.0, n_routed_experts=EXPERTS)
LAYERS = 4  # calls in one graph, each with rows of its own
ROUNDS = 10 if DEVICE == "cuda" else 1
IMBALANCE = 1.8  # tokens of the first of two ranks over the mean, where routing is forced
MANY_ROWS = 4096 if DEVICE == "cuda" else 64
ALIKE_S = 10.0  # between one rank's failure and the other's
# Ends of a trip as kernels, and the shared expert beside.
FORMS = {"plain": (False, False), "kernels": (True, False), "beside": (True, True)}
HOT = 8  # how many times its share the hot expert gets


class Block:
    """All experts of one layer, and shares of them."""

    def __init__(self) -> None:
        draw = torch.Generator(DEVICE).manual_seed(0)

        def packed(form: Format, groups: int, rows: int, columns: int) -> PackedWeights:
            part = PackedWeights.empty(form, groups, rows, columns, DEVICE)
            if form is Format.FP4:
                part.codes.random_(0, 256, generator=draw)
            else:
                values = torch.randn(part.codes.shape, device=DEVICE, generator=draw).to(torch.float8_e4m3fn)
                part.codes.copy_(values.view(torch.uint8))
            part.scales.fill_(form.bias + (119 if form is Format.FP4 else 121))  # values of about 1 / sqrt(fan-in)
            return part

        self.all = PackedExperts(
            packed(Format.FP4, EXPERTS, 2 * INNER, HIDDEN),
            packed(Format.FP4, EXPERTS, HIDDEN, INNER),
            packed(Format.FP8, 1, 2 * INNER, HIDDEN),
            packed(Format.FP8, 1, HIDDEN, INNER),
        )
        gate = torch.randn(EXPERTS, HIDDEN, device=DEVICE, generator=draw) * HIDDEN**-0.5
        self.gate = WideLinear(gate.bfloat16() if DEVICE == "cuda" else gate)
        self.bias = torch.zeros(EXPERTS, device=DEVICE)

    def alone(self) -> PackedMoE:
        return PackedMoE(self.gate, self.bias, self.all, CHOSEN, TEXT, False)

    def share(self, held: tuple[int, ...]) -> PackedExperts:
        index = torch.tensor(held, device=DEVICE)

        def cut(part: PackedWeights) -> PackedWeights:
            return PackedWeights(part.format, part.codes[index], part.scales[index], part.rows, part.columns)

        return PackedExperts(cut(self.all.w13), cut(self.all.w2), self.all.shared_w13, self.all.shared_w2)


class Bench:
    """One rank."""

    def __init__(self, rank: int, group: GlooGroup) -> None:
        self.rank, self.group = rank, group
        self.tensors = group.split(2, DEVICE)
        self.block = Block()
        self.alone = self.block.alone()
        self.shares: dict[tuple[int, ...], PackedExperts] = {}
        self.peers: dict[bool, OpenPeers] = {}  # by whether every term comes home
        self.routes = list(Route)
        self.results: dict[str, Any] = {
            "rank": rank,
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
            "torch": torch.__version__,
        }
        try:
            check_peers(2, HIDDEN, 2, CHOSEN, DEVICE)
            for exact in (False, True):
                self.peers[exact] = OpenPeers(self.tensors, PeerLayout.of(2, MOST_ROWS, HIDDEN, 2, CHOSEN, exact), 120.0)
        except ConfigError as error:  # on both ranks
            self.routes.remove(Route.PEERS)
            self.results["peers"] = str(error)

    def barrier(self) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.group.max([0])

    def exchange(
        self, *, extra: int = 0, exact: bool = False, route: Route = Route.GATHER, attach: bool = True, **changes: Any
    ) -> ExpertExchange:
        placement = Placement.initial(EXPERTS, extra, 2)
        exchange = ExpertExchange(
            self.tensors,
            placement,
            LAYERS,
            LAYERS,
            exact=exact,
            route=route,
            device=DEVICE,
            hidden=HIDDEN,
            dtype=torch.bfloat16,
            num_chosen=CHOSEN,
            peers=self.peers[exact] if route is Route.PEERS else None,
            **changes,
        )
        if attach:
            held = exchange.local_experts
            if held not in self.shares:
                self.shares = {held: self.block.share(held)}
            for number in range(LAYERS):
                exchange.attach(number, replace(self.alone, experts=self.shares[held], exchange=exchange))
        return exchange

    def rows(self, count: int, seed: int) -> Tensor:
        """Inputs of one call."""
        draw = torch.Generator(DEVICE).manual_seed(1000 * seed + self.rank)
        return torch.randn(count, HIDDEN, device=DEVICE, generator=draw).bfloat16()

    def hot_bias(self, hot: int) -> Tensor:
        """Selection biases with which the first `hot` experts get HOT times their share; the same on both ranks."""
        draw = torch.Generator(DEVICE).manual_seed(7)
        logits = self.block.gate(torch.randn(8192, HIDDEN, device=DEVICE, generator=draw).bfloat16())
        low, high = 0.0, 8.0
        for _ in range(20):
            bias = torch.zeros(EXPERTS, device=DEVICE)
            bias[:hot] = (low + high) / 2
            ids, _ = route_experts(logits, bias, CHOSEN, 1.0)
            share = float((ids < hot).sum()) / len(ids) / hot / (CHOSEN / EXPERTS)
            low, high = (low, (low + high) / 2) if share > HOT else ((low + high) / 2, high)
        return bias

    # ---- correctness

    def equality(self) -> dict[str, float]:
        """Largest relative error of the shared block against the whole one, by route, sum and rows of the two ranks."""
        errors = {}
        for route in self.routes:
            for exact in (False, True):
                exchange = self.exchange(exact=exact, route=route)
                moe = block_of(exchange, 0)
                for counts in ((8, 8), (64, 3), (0, 5), (700, 1024)):
                    count = counts[self.rank]
                    x = self.rows(count, seed=count)
                    exchange.begin(count, count)
                    got = moe(x, 0) if count else x
                    exchange.finish()
                    if count:
                        want = self.alone(x).float()
                        errors[f"{route} {'exact' if exact else 'summed'} {counts}"] = float(
                            (got.float() - want).abs().max() / want.abs().max()
                        )
                    assert bool(got.isfinite().all())
        return errors

    def engine(self) -> dict[str, float]:
        """A small model through the runner: logits of a prompt and of decode steps against those of a rank with all experts."""
        from engine.batch import Batch, StepKind
        from engine.config import EngineConfig
        from engine.model_runner import ModelRunner
        from tests.models.golden import GOLDEN, PROMPTS, Seq

        errors: dict[str, float] = {}
        logits: dict[int, list[Tensor]] = {}
        for ep in (1, 2):
            sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 80, "max_num_seqs": 4, "max_model_len": 384, "num_draft_tokens": 4}
            config = EngineConfig(model=str(GOLDEN / "tiny-a-bf16"), device=DEVICE, precision="B", dp=2, ep=ep, enforce_eager=True, **sizes)
            runner = ModelRunner(config, group=self.group)
            seq = Seq(runner, PROMPTS[3][: 60 + 20 * self.rank], 1)
            logits[ep] = [runner.run(Batch(StepKind.PREFILL, [seq.slice(40 + 20 * self.rank)])).clone()]
            for step in range(8):
                if self.rank == 1 and step % 2:
                    if ep > 1:
                        runner.join(StepKind.DECODE)
                else:
                    logits[ep].append(runner.run(Batch(StepKind.DECODE, [seq.slice(seq.done + 1)])).clone())
        for number, (one, two) in enumerate(zip(logits[1], logits[2], strict=True)):
            errors[f"step {number}"] = float((one - two).abs().max() / one.abs().max())
        return errors

    def steps(self) -> None:
        """A small model in the released formats: decode steps with shared experts, recorded and eager, also with one rank idle."""
        from engine.batch import Batch, StepKind
        from engine.config import EngineConfig
        from engine.model_runner import ModelRunner
        from tests.models.golden import GOLDEN, PROMPTS, Seq

        cuda = DEVICE == "cuda"
        sizes: dict[str, Any] = {"block_size": 128, "num_blocks": 21, "max_num_seqs": 4, "max_model_len": 600, "num_draft_tokens": 0}
        config = EngineConfig(model=str(GOLDEN / "tiny-a-fp8"), device=DEVICE, precision="B", dp=2, ep=2, enforce_eager=not cuda, **sizes)
        runner = ModelRunner(config, group=self.group, recorder=None if cuda else NullRecorder())
        logits: dict[str, list[Tensor]] = {}
        for _ in range(2):  # recorded, if steps could be, then eager
            path = runner.path
            kept = logits.setdefault(path, [])
            for count in (1, 4):
                seqs = [Seq(runner, PROMPTS[3], slot) for slot in range(1, 1 + count)]
                runner.run(Batch(StepKind.PREFILL, [seq.slice(40) for seq in seqs]))
                for idle in (False, True):
                    times = []
                    for _ in range(12):
                        self.barrier()
                        began = time.perf_counter()
                        if idle and self.rank == 1:
                            runner.join(StepKind.DECODE)
                        else:
                            kept.append(runner.run(Batch(StepKind.DECODE, [seq.slice(seq.done + 1) for seq in seqs])).clone())
                        if cuda:
                            torch.cuda.synchronize()
                        times.append((time.perf_counter() - began) * 1e3)
                    row = {"path": path, "rows": count, "one_idle": idle, "step_ms": round(statistics.median(times[2:]), 3)}
                    self.results.setdefault("step_times", []).append(row)
                    print(self.rank, json.dumps(row), flush=True)
            runner.drop_recordings()
        if len(logits) == 2:
            one, two = logits.values()
            change = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, two, strict=True))
            same = all(torch.equal(a.argmax(-1), b.argmax(-1)) for a, b in zip(one, two, strict=True))
            self.results["recorded_against_eager"] = {"largest_change": change, "same_tokens": same}

    # ---- time

    def record(self, call: Callable[[], Any]) -> Callable[[], None]:
        if DEVICE != "cuda":
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
        torch.cuda.synchronize()
        return graph.replay

    def microseconds(self, replay: Callable[[], None], together: bool = True) -> float:
        """Median of one call's time. together: on both ranks at once; the call before brings them into step."""
        times = []
        for _ in range(ROUNDS + 2):
            if together:
                self.barrier()
            replay()
            if DEVICE != "cuda":
                began = time.perf_counter()
                replay()
                times.append((time.perf_counter() - began) * 1e6 / LAYERS)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / LAYERS)
        return statistics.median(times[2:])

    def shared_calls(self, exchange: ExpertExchange, inputs: list[Tensor], outputs: list[Tensor] | None = None) -> Callable[[], None]:
        """The block on all inputs, as a graph. Capacities are agreed on once, as they are once per step. outputs: those of a call."""
        exchange.begin(len(inputs[0]), len(inputs[0]))
        exchange.finish()

        def call() -> None:
            exchange.restart()
            made = [block_of(exchange, number)(x, number) for number, x in enumerate(inputs)]
            if outputs is not None:
                outputs[:] = made

        return self.record(call)

    def decode(self) -> None:
        for count in BATCHES:
            inputs = [self.rows(count, seed=count + 10 * n) for n in range(LAYERS)]
            row: dict[str, Any] = {"rows_per_rank": count}
            alone = self.record(partial(self.run_alone, inputs))
            for turn in range(2):  # the other rank waits
                self.barrier()
                if turn == self.rank:
                    row["alone_us"] = self.microseconds(alone, together=False)
                self.barrier()
            row["both_alone_us"] = self.microseconds(alone)
            made: dict[Route, list[Tensor]] = {route: [] for route in self.routes}
            for route in self.routes:
                row[f"{route}_us"] = self.microseconds(self.shared_calls(self.exchange(route=route), inputs, made[route]))
                router_us = row.setdefault("router_us", self.router(inputs))
                row[f"{route}_comm_us"] = self.microseconds(self.shared_calls(self.travelling(route=route), inputs)) - router_us
            row["forms"] = self.forms(inputs)
            row["speedup"] = 2 * row["alone_us"] / min(row[f"{route}_us"] for route in self.routes)
            row["same_bits"] = all(
                torch.equal(one, two) for other in made.values() for one, two in zip(made[Route.GATHER], other, strict=True)
            )
            row["independent"] = 2 * row["alone_us"] / row["both_alone_us"]
            row["comm_share"] = row["gather_comm_us"] / row["gather_us"]
            self.results.setdefault("decode", []).append(row)
            print(self.rank, json.dumps(row), flush=True)

    def travelling(self, **changes: Any) -> ExpertExchange:
        """An exchange without experts: what its steps take is dispatch, combine and the router."""
        exchange = self.exchange(attach=False, **changes)
        nothing = NoExperts(self.block, exchange)
        for number in range(LAYERS):
            exchange.attach(number, nothing)
        return exchange

    def forms(self, inputs: list[Tensor]) -> dict[str, Any]:
        """Times of the exchange by `gather` with and without each of its ways to be quick, dispatch and combine alone behind them."""
        times: dict[str, Any] = {}
        wanted: list[Tensor] = []
        backend = PACK_ROWS.backend
        for name, (kernels, beside) in FORMS.items():
            for op in (PACK_ROWS, LOCAL_CHOICES, ADD_RANK_SUMS):
                op.use(backend if kernels else "reference")
            outputs: list[Tensor] = []
            whole_us = self.microseconds(self.shared_calls(self.exchange(beside=beside), inputs, outputs))
            wanted = wanted or outputs
            same = all(torch.equal(one, two) for one, two in zip(wanted, outputs, strict=True)) and bool(outputs[0].isfinite().all())
            travel_us = self.microseconds(self.shared_calls(self.travelling(beside=beside), inputs))
            times[name] = {"us": whole_us, "without_experts_us": travel_us, "same_bits": same}
        return times

    def run_alone(self, inputs: list[Tensor]) -> None:
        for x in inputs:
            self.alone(x)

    def router(self, inputs: list[Tensor]) -> float:
        block = self.block

        def call() -> None:
            for x in inputs:
                route_experts(block.gate(x), block.bias, CHOSEN, TEXT.routed_scaling_factor)

        return self.microseconds(self.record(call))

    # ---- balance

    def recovery(self) -> None:
        """Time of a step with hot experts before and after balancing, beside that of even routing.

        Hot experts of decode rows cost little, as the weights that are read stay the same. What hurts is many rows: their products are
        the time, so there the first rank gets IMBALANCE times the mean, counted off instead of routed.
        """
        for hot in (1, 16):
            self.results.setdefault("balance", []).append(self.recover(hot, BATCHES[-1]))
            print(self.rank, json.dumps(self.results["balance"][-1]), flush=True)
        for count in (BATCHES[-1], MANY_ROWS):
            self.results["balance"].append(self.recover(0, count, IMBALANCE))
            print(self.rank, json.dumps(self.results["balance"][-1]), flush=True)

    def recover(self, hot: int, count: int, imbalance: float = 0.0) -> dict[str, Any]:
        """hot: experts at HOT times their share. imbalance: instead of that, tokens of the first rank over the mean."""
        inputs = [self.rows(count, seed=n) for n in range(LAYERS)]
        exchange = self.exchange(extra=0 if imbalance else 16)
        first = len(exchange.layers[0].placement.held_by(0))
        if imbalance:
            exchange.forced = ForcedRouting(1.0, 2, first, EXPERTS)
        even_us = self.microseconds(self.shared_calls(exchange, inputs))
        skewed = block_of(exchange, 0)
        if imbalance:
            exchange.forced = ForcedRouting(imbalance, 2, first, EXPERTS)
        else:
            skewed = replace(skewed, bias=self.hot_bias(hot))
        # Layers move one by one, so each needs weights of its own.
        for number in range(LAYERS):
            exchange.layers[number].experts[:] = [replace(skewed, experts=copy_of(skewed.experts))]
        before_us = self.microseconds(self.shared_calls(exchange, inputs))
        balancer = Balancer(exchange, BalanceSettings(interval=8, window=8, report=8))
        history = []
        for _ in range(16 + LAYERS):
            exchange.begin(count, count)
            outputs = [block_of(exchange, number)(x, number) for number, x in enumerate(inputs)]
            exchange.finish()
            balancer.end_step(False)
            history.append(outputs)
        exchange.counting = False
        after_us = self.microseconds(self.shared_calls(exchange, inputs))
        change = max(
            float((a.float() - b.float()).abs().max() / a.float().abs().max()) for a, b in zip(history[0], history[-1], strict=True)
        )
        figures = balancer.figures
        return {
            "hot_experts": hot,
            "imbalance": imbalance,
            "rows_per_rank": count,
            "even_us": even_us,
            "skewed_us": before_us,
            "balanced_us": after_us,
            "recovered": even_us / after_us,
            "balance": figures.balance,
            "moved_layers": figures.moved_layers,
            "moved_bytes": figures.moved_bytes,
            "largest_change": change,
        }


def block_of(exchange: ExpertExchange, number: int) -> Any:
    """The block that computes a layer."""
    return exchange.layers[number].experts[0]


def copy_of(experts: PackedExperts) -> PackedExperts:
    def copied(part: PackedWeights) -> PackedWeights:
        return PackedWeights(part.format, part.codes.clone(), part.scales.clone(), part.rows, part.columns)

    return PackedExperts(copied(experts.w13), copied(experts.w2), experts.shared_w13, experts.shared_w2)


class NoExperts(PackedMoE):
    """A block whose experts cost nothing."""

    def __init__(self, block: Block, exchange: ExpertExchange) -> None:
        for name, value in (
            ("gate", block.gate), ("bias", block.bias), ("experts", block.all), ("num_chosen", CHOSEN), ("text", TEXT), ("quantize", False),
            ("exchange", exchange),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    def summed(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return x.contiguous()

    def shared(self, x: Tensor) -> Tensor:
        return x


def failed_alike(out: Path, part: str, rank: int) -> bool:
    """Whether the other rank fails in this part too: then the next part can still tell something."""
    (out / f"{part}-{rank}.failed").touch()
    deadline = time.monotonic() + ALIKE_S
    while time.monotonic() < deadline:
        if (out / f"{part}-{1 - rank}.failed").exists():
            return True
        time.sleep(0.1)
    return False


def rank_main(rank: int, out: Path) -> None:
    began = time.monotonic()
    select("auto", DEVICE)
    bench = Bench(rank, GlooGroup(rank, 2, init_file=str(out / "meet"), timeout_s=120))
    for part in (bench.equality, bench.steps, bench.decode, bench.recovery, bench.engine):
        try:
            result = part()
            if result is not None:
                bench.results[part.__name__] = result
                print(rank, part.__name__, f"{max(result.values()):.2e}", flush=True)
        except Exception:
            bench.results[f"{part.__name__} failed"] = traceback.format_exc()
            traceback.print_exc()
            (out / f"rank-{rank}.json").write_text(json.dumps(bench.results, indent=1))
            if not failed_alike(out, part.__name__, rank):
                os._exit(1)  # the other one waits in a collective that nobody joins
        bench.results["seconds"] = round(time.monotonic() - began, 1)
        (out / f"rank-{rank}.json").write_text(json.dumps(bench.results, indent=1))
        print(rank, part.__name__, "done after", bench.results["seconds"], "s", flush=True)
    bench.barrier()
    os._exit(0)  # graphs hold communicators; nothing is left to be written


def main(out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    (out / "meet").unlink(missing_ok=True)
    for left in out.glob("*.failed"):
        left.unlink()
    commands = [[sys.executable, "-m", "tests.gpu.two_gpus", str(out), str(rank), *sys.argv[2:]] for rank in range(2)]
    codes = run_together(commands, own_gpus=True)
    report(out)
    return max(map(abs, codes))


def report(out: Path) -> None:
    path = out / "rank-0.json"
    if not path.exists():
        print("no results")
        return
    results = json.loads(path.read_text())
    errors = results.get("equality", {})
    print("peers:", results.get("peers", "open"))
    print(f"largest relative error of {len(errors)} comparisons: {max(errors.values(), default=float('nan')):.2e}")
    steps = results.get("engine", {})
    print(f"largest relative error of {len(steps)} steps of a small model: {max(steps.values(), default=float('nan')):.2e}")
    print("recorded against eager steps:", results.get("recorded_against_eager", "steps were not recorded"))
    for row in results.get("step_times", []):
        print(f"{row['path']:>7} {row['rows']} rows per rank{', one rank idle' if row['one_idle'] else ''}: {row['step_ms']:.3f} ms a step")
    names = ("alone", "both", "gather", "a2a", "peers", "speedup", "indep.", "comm", "peers'", "share", "bits")
    print(f"{'rows':>5} " + " ".join(f"{name:>8}" for name in names))
    for row in results.get("decode", []):
        times = [row["alone_us"], row["both_alone_us"], row["gather_us"], row["all_to_all_us"], row.get("peers_us", 0.0)]
        times += [row["speedup"], row["independent"], row["gather_comm_us"], row.get("peers_comm_us", 0.0), row["comm_share"]]
        print(
            f"{row['rows_per_rank']:>5} " + " ".join(f"{time:>8.2f}" for time in times) + ("     same" if row["same_bits"] else "    OTHER")
        )
    for row in results.get("decode", []):
        for name, form in row["forms"].items():
            bits = "same" if form["same_bits"] else "OTHER"
            print(
                f"{row['rows_per_rank']:>5} {name:>8} {form['us']:>8.1f} us, without experts {form['without_experts_us']:.1f}, {bits} bits"
            )
    for row in results.get("balance", []):
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[2].isdigit():
        rank_main(int(sys.argv[2]), Path(sys.argv[1]))
    else:
        sys.exit(main(Path(sys.argv[1])))
