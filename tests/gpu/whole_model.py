"""All 40 layers of the released shapes over several GPUs, experts shared: `python -m tests.gpu.whole_model OUT --ranks 8`.

Weights are drawn on the GPUs, never read. Prints time per decode step, recorded and eager, beside its byte floor and beside predictions
made from single layers on one GPU (`docs/hopper.md`), then the prefill of one prompt. With fewer than eight GPUs give `--layers`; with
`--ranks 1` the rank exchanges rows with itself. `--device cpu` tries it at small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any

from deepinfer_cli.opbench.layer_floor import layer_floor
from engine.models.config import ModelConfig, parse_config
from engine.models.released import excerpt, write_excerpt
from tests.gpu.ranks import exchanging_alone, rank_command, rank_options, run_together

CONTEXT, STEPS, PROMPT = 8_192, 20, 32_768
BATCHES = (1, 8, 64, 256)
# Measured: time of a follower layer over its floor on one H200, what a layer costs beyond it when ranks exchange rows (NCCL, 2 GPUs), and
# what the host takes for an eager layer with its exchange.
OVER_FLOOR = {1: 2.65, 8: 1.57, 64: 1.30, 256: 1.52}
EXCHANGE_US, COPY_TBS, EAGER_MS = 40.0, 4.25, 3.1


def floor_ms(config: ModelConfig, batch: int, ranks: int) -> float:
    """Bytes of all layers and the head for one step, read by all ranks together at the measured copy speed of each."""
    text = config.text
    touched = text.n_routed_experts * (1 - (1 - text.num_experts_per_tok / text.n_routed_experts) ** batch)
    total = 0.0
    for layer in range(text.num_hidden_layers):
        floor = layer_floor(config, layer, CONTEXT)
        # Dense weights are on every rank that has rows; experts and rows are divided.
        total += floor.dense_bytes + (touched * floor.expert_bytes + batch * floor.row_bytes) / ranks
    return (total + 2 * text.vocab_size * text.hidden_size) / COPY_TBS / 1e9


def predicted_ms(config: ModelConfig, batch: int, ranks: int, eager: bool) -> float:
    """The floor times what a layer needs over it, and exchanges; eager steps take their launches at least."""
    layers = config.text.num_hidden_layers
    device = floor_ms(config, batch, ranks) * OVER_FLOOR[batch] + layers * EXCHANGE_US / 1e3
    return max(device, layers * EAGER_MS) if eager else device


def run_rank(rank: int, options: argparse.Namespace) -> None:
    import torch

    from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
    from engine.config import EngineConfig
    from engine.cuda_graph import NullRecorder
    from engine.distributed import GlooGroup
    from engine.layer_runs import LayerRuns
    from engine.model_runner import ModelRunner

    cuda, ranks = options.device == "cuda", options.ranks
    if cuda:
        torch.cuda.set_device(rank)
    context, prompt = (CONTEXT, PROMPT) if cuda else (64, 96)
    mine = {batch: len(range(rank, batch, ranks)) for batch in BATCHES}
    most = max(mine.values())
    config = EngineConfig(
        model=options.model, load_format="dummy", device=options.device, precision="B", dp=ranks, ep=ranks, spec=False, num_draft_tokens=0,
        max_num_seqs=most, num_blocks=max(most * (context // 128 + 2), prompt // 128 + 2) + 1, max_num_batched_tokens=prompt,
        max_model_len=min(context, prompt), enforce_eager=not cuda,
    )  # fmt: skip
    began = time.perf_counter()
    group = GlooGroup(rank, ranks, init_file=options.meeting, timeout_s=600)
    # On CPUs nothing is recorded by itself; this runs the same code.
    recorder = None if cuda else NullRecorder()
    with nullcontext() if ranks > 1 else exchanging_alone():
        runner = ModelRunner(config, group=group, recorder=recorder)
    LayerRuns(runner, 1, context)  # fills the cache with random rows
    report: dict[str, Any] = {"load_s": time.perf_counter() - began, "decode_ms": {}, "recordings": [str(r) for r in runner.recordings]}

    def timed(batch: Batch | None, kind: StepKind) -> float:
        if cuda:
            torch.cuda.synchronize()
        group.max([0])
        start = time.perf_counter()
        _ = runner.join(kind) if batch is None else runner.run(batch)
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    per_seq = context // 128 + 1
    for _ in range(2):  # recorded, if steps could be, then eager
        times = report["decode_ms"].setdefault(runner.path, {})
        for total, count in mine.items():
            slices = [
                SequenceSlice([7 + i], context - 2, context, list(range(1 + i * per_seq, 1 + (i + 1) * per_seq)), 1 + i, (5, 5, 5))
                for i in range(count)
            ]
            batch = Batch(StepKind.DECODE, slices) if slices else None
            times[total] = statistics.median([timed(batch, StepKind.DECODE) for _ in range(STEPS)][2:])
        runner.drop_recordings()
    ids = [5 + i % 400 for i in range(prompt)]
    piece = SequenceSlice(ids, 0, prompt, list(range(1, prompt // 128 + 2)), 1, logit_rows=LogitRows.LAST)
    long = Batch(StepKind.PREFILL, [piece]) if rank == 0 else None
    report["prefill_ms"] = min(timed(long, StepKind.PREFILL) for _ in range(3))
    if cuda:
        report["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    (options.out / f"rank-{rank}.json").write_text(json.dumps(report))
    group.close()
    sys.stdout.flush()
    os._exit(0)  # NCCL's own threads may wait for the peers'


def small(data: dict[str, Any]) -> dict[str, Any]:
    """Sizes for a try without GPUs."""
    data["text_config"] |= {
        "vocab_size": 512, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 64,
        "o_groups": 2, "o_lora_rank": 32, "moe_intermediate_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 2, "index_n_heads": 4,
        "index_head_dim": 32, "index_topk": 32, "candidate_topk_blocks": 8, "engram_compressed_vocab_size": 512,
        "dspark_noise_token_id": 501,
    }  # fmt: skip
    return data


def main() -> None:
    parser = rank_options(argparse.ArgumentParser())
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", default="", help="released layer numbers, all 40 when empty")
    options = parser.parse_args()
    if options.rank >= 0:
        return run_rank(options.rank, options)
    options.out.mkdir(parents=True, exist_ok=True)
    layers = [int(n) for n in options.layers.split(",")] if options.layers else list(range(40))
    data = excerpt(layers, stages=0, engram_rows=997 if options.device == "cpu" else 1_000_000)
    data = small(data) if options.device == "cpu" else data
    model, meeting = write_excerpt(options.out / "model", data), options.out / f"meeting-{os.getpid()}"
    shape = ["--ranks", str(options.ranks)]
    commands = [[*rank_command("tests.gpu.whole_model", options, rank, model, meeting), *shape] for rank in range(options.ranks)]
    codes = run_together(commands)
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    show(options, parse_config(data), len(layers))


def show(options: argparse.Namespace, config: ModelConfig, num_layers: int) -> None:
    reports = [json.loads((options.out / f"rank-{rank}.json").read_text()) for rank in range(options.ranks)]
    loaded = f"loaded in {max(r['load_s'] for r in reports):.0f} s"
    print(f"{num_layers} layers, {options.ranks} ranks", loaded, *reports[0]["recordings"], sep="; ")
    print("steps   batch  step ms  floor ms  over floor  predicted ms  tok/s a user")
    for path in reports[0]["decode_ms"]:
        for batch in BATCHES:
            took = max(r["decode_ms"][path][str(batch)] for r in reports)
            floor, guess = floor_ms(config, batch, options.ranks), predicted_ms(config, batch, options.ranks, path == "eager")
            print(f"{path:7s} {batch:5d} {took:8.2f} {floor:9.3f} {took / floor:11.1f} {guess:13.2f} {1e3 / took:13.1f}")
    print(f"prefill of one prompt: {max(r['prefill_ms'] for r in reports):.0f} ms; peak {reports[0].get('peak_gib', 0):.1f} GiB a rank")


if __name__ == "__main__":
    main()
