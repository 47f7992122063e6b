"""One long prompt on one rank and on two that prefill together: `python -m tests.gpu.context_parallel OUT [--device cpu]`.

Layers of the released shapes with random weights (on CPUs the small golden model), compact truncation, the prompt in chunks. Each rank
is a process with a GPU of its own. The chunk of one rank and of two together is the same. Prints a row per chunk size as it comes; no new
one begins after `LATEST_S`.

The logits of both must agree as far as the order of sums allows. How far that is shows the control: one rank in chunks of half the size,
whose products have as many rows as those of a rank that shares. "same bytes" is the share of the cache's bytes that are equal; a wrong
split would change whole rows from the first layer on. `tests/engine/test_context_parallel.py` shows equal bits where sums have one order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.ranks import rank_command, rank_options, run_together

LAYERS = (2, 3, 8, 9, 20, 21)
GOLDEN = Path(__file__).parents[1] / "golden" / "model" / "tiny-a-bf16"
LONG, KEEP, ROUNDS, LATEST_S = 65_536, 140, 2, 60.0
CHUNKS = {"cuda": (16_384, 32_768, 8_192), "cpu": (64, 128)}


def settings(device: str, model: str, ranks: int, length: int, chunk: int) -> dict[str, Any]:
    common: dict[str, Any] = {"model": model, "device": device, "dp": ranks, "cp": ranks, "yoco_mode": "compact", "spec": False}
    common |= {
        "max_num_seqs": 2,
        "max_num_batched_tokens": chunk,
        "max_model_len": length + 8,
        "num_draft_tokens": 1,
        "enforce_eager": True,
    }
    if device == "cpu":
        return common | {"block_size": 16, "yoco_keep_tokens": 40, "num_blocks": ranks * 30 + 1, "num_threads": 1}
    return common | {"load_format": "dummy", "yoco_keep_tokens": KEEP, "num_blocks": ranks * (length // 128 + 2) + 1}


def prefill(runner: Any, prompt: list[int], chunk: int, together: bool, owner: bool) -> Any:
    """The whole prompt on state slot 1 and the first blocks. Returns its logits [1, V], or none for a rank that only helps."""
    import torch

    from engine.batch import Batch, LogitRows, SequenceSlice, StepKind

    logits = None
    table = list(range(1, -(-len(prompt) // runner.kv.block_size) + 1))
    back = runner.limits.ngram_history
    for start in range(0, len(prompt), chunk):
        end = min(len(prompt), start + chunk)
        if not owner:
            runner.join(StepKind.PREFILL)
            continue
        rows = LogitRows.LAST if end == len(prompt) else LogitRows.NONE
        history = tuple(prompt[max(0, start - back) : start])
        batch = Batch(StepKind.PREFILL, [SequenceSlice(prompt[start:end], start, len(prompt), table, 1, history, logit_rows=rows)])
        with torch.inference_mode():
            # `_forward` is what a rank runs that prefills alone.
            logits = runner.run(batch) if together else runner._forward(batch, None)
    return logits


def measure(runner: Any, prompt: list[int], chunk: int, together: bool, owner: bool) -> tuple[list[float], Any]:
    """Seconds of `ROUNDS` prefills after two chunks that are not counted, and the last logits."""
    times, logits = [], None
    prefill(runner, prompt[: 2 * chunk], chunk, together, owner)
    for _ in range(ROUNDS):
        wait(runner)
        began = time.perf_counter()
        logits = prefill(runner, prompt, chunk, together, owner)
        wait(runner)
        times.append(time.perf_counter() - began)
    return times, logits


def wait(runner: Any) -> None:
    import torch

    if runner.limits.device == "cuda":
        torch.cuda.synchronize()


def gather_ms(runner: Any, rows: int) -> float:
    """One all-gather of `rows` window keys of a rank, as every layer does it."""
    import torch

    group = runner._shared.exchange.group
    mine = torch.zeros(rows, *runner.kv.rings.shape[2:], dtype=runner.kv.rings.dtype, device=runner.limits.device)
    out = mine.new_empty(group.size, *mine.shape)
    for _ in range(3):
        group.all_gather(out, mine)
    wait(runner)
    began = time.perf_counter()
    for _ in range(20):
        group.all_gather(out, mine)
    wait(runner)
    return (time.perf_counter() - began) / 20 * 1e3


def rank_main(rank: int, device: str, model: str, meeting: str, out: Path) -> None:
    import torch

    from engine.config import EngineConfig
    from engine.distributed import GlooGroup
    from engine.model_runner import ModelRunner

    began = time.monotonic()
    length = LONG if device == "cuda" else 300
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, 400, (length,), generator=draw).tolist()
    group = GlooGroup(rank, 2, init_file=meeting, timeout_s=300)
    runner = ModelRunner(EngineConfig(**settings(device, model, 2, length, max(CHUNKS[device]))), group=group)
    report: dict[str, Any] = {"rank": rank, "length": length, "ready_s": time.monotonic() - began, "chunks": {}}
    if rank == 0:
        print(f"prompt of {length} tokens, median of {ROUNDS}; alone: one rank; together: two; ready after {report['ready_s']:.0f} s")
        print(
            f"{'chunk':>7} {'alone s':>9} {'together s':>11} {'ratio':>6} {'spread':>7} {'gather ms':>10}"
            f" {'cosine':>9} {'token':>6} {'same bytes':>10} | {'control':>9} {'token':>6} {'same bytes':>10}",
            flush=True,
        )
    for chunk in CHUNKS[device]:
        if group.max([int(time.monotonic() - began > LATEST_S)])[0]:
            break
        alone, expected = measure(runner, prompt, chunk, together=False, owner=True)
        cache = runner.kv.blocks.clone()
        control = agreement(prefill(runner, prompt, chunk // 2, together=False, owner=True), expected, runner, cache)
        group.max([0])
        joint, logits = measure(runner, prompt, chunk, together=True, owner=rank == 0)
        row: dict[str, Any] = {"alone_s": alone, "together_s": joint, "gather_ms": gather_ms(runner, chunk // 2)}
        if rank == 0:
            row |= {"shared": agreement(logits, expected, runner, cache), "control": control}
            show(chunk, row)
        report["chunks"][chunk] = row
        (out / f"rank-{rank}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # NCCL's own threads may wait for the peer's


def agreement(logits: Any, expected: Any, runner: Any, cache: Any) -> dict[str, Any]:
    """Of a prefill that has just been computed with an earlier one. cache: what the earlier one left in the blocks."""
    import torch

    return {
        "cosine": torch.nn.functional.cosine_similarity(logits.float(), expected.float()).item(),
        "same_token": bool((logits.argmax(-1) == expected.argmax(-1)).all()),
        "same_bytes": float((runner.kv.blocks[1:] == cache[1:]).float().mean()),
    }


def show(chunk: int, row: dict[str, Any]) -> None:
    alone, joint = statistics.median(row["alone_s"]), statistics.median(row["together_s"])
    spread = (max(row["together_s"]) - min(row["together_s"])) / joint
    facts = " | ".join(
        f"{part['cosine']:9.6f} {'same' if part['same_token'] else 'other':>6} {part['same_bytes']:10.5f}"
        for part in (row["shared"], row["control"])
    )
    print(f"{chunk:>7} {alone:9.3f} {joint:11.3f} {alone / joint:6.2f} {spread:7.1%} {row['gather_ms']:10.3f} {facts}", flush=True)


def main() -> None:
    options = rank_options(argparse.ArgumentParser()).parse_args()
    if options.rank >= 0:
        rank_main(options.rank, options.device, options.model, options.meeting, options.out)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = GOLDEN
        if options.device == "cuda":
            from engine.models.released import excerpt, write_excerpt

            model = write_excerpt(Path(scratch) / "model", excerpt(LAYERS, stages=0))
        meeting = Path(scratch) / "meeting"
        commands = [rank_command("tests.gpu.context_parallel", options, rank, model, meeting) for rank in range(2)]
        codes = run_together(commands, own_gpus=True)
    if any(codes):
        sys.exit(f"ranks exited with {codes}")


if __name__ == "__main__":
    main()
