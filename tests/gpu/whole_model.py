"""All 40 layers of the released shapes over several GPUs, experts shared: `python -m tests.gpu.whole_model OUT --ranks 8`.

Weights are drawn on the GPUs, never read, once for all parts (`--parts`, in the order given):

    decode   recorded decode steps by batch, verify steps and drafts, beside byte floors
    drafts   engines that decode plain and with forced accept lengths: tokens per second
    shares   what kernels take of a step: experts, attention, exchange, and what is left
    prefill  prompts of 32,768 and 131,072 tokens, of every rank at once and of all ranks together
    ttft     first tokens of cold prompts and of hits in the host cache, on all ranks at once
    routes   decode steps recorded again, rows through the memory of peers instead of collectives
    eager    decode steps without recordings

Every figure has its prediction beside it (`whole_predictions.py`) and is written as soon as it is found: the tables at the end show all
there are, also after `--budget` seconds and when the script is told to end. With fewer than four GPUs give `--layers`; with `--ranks 1` the
rank exchanges rows with itself. `--device cpu` tries everything at small sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from typing import Any

from engine.models.config import parse_config
from engine.models.released import excerpt, write_excerpt
from tests.gpu.ranks import rank_command, rank_options, run_together

PARTS = ("decode", "drafts", "shares", "prefill", "ttft", "routes", "eager")
GRACE_S = 20.0  # what a figure that has been begun may take beyond the budget


def run_rank(rank: int, options: argparse.Namespace) -> None:
    from tests.gpu import whole_engine, whole_parts
    from tests.gpu.whole_session import make_session

    session = make_session(rank, options)
    say(session, "ready")
    for part in options.parts.split(","):
        began = time.monotonic()
        try:
            getattr(whole_engine if part in ("drafts", "ttft") else whole_parts, part)(session)
        except Exception:  # the parts behind it may still show something; the tables print this
            session.report.setdefault("errors", {})[part] = traceback.format_exc()
            if session.runner._exchange is not None:
                session.runner._exchange.pass_over()
        session.report.setdefault("seconds", {})[part] = time.monotonic() - began
        session.save()
        say(session, part)
    sys.stdout.flush()
    os._exit(0)  # NCCL's own threads may wait for the peers'


def say(session: Any, what: str) -> None:
    if session.rank == 0:
        print(f"{time.monotonic() - session.options.began:6.1f} s  {what}", flush=True)


def small(data: dict[str, Any]) -> dict[str, Any]:
    """Sizes for a try without GPUs."""
    data["text_config"] |= {
        "vocab_size": 512, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 64,
        "o_groups": 2, "o_lora_rank": 32, "moe_intermediate_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 2, "index_n_heads": 4,
        "index_head_dim": 32, "index_topk": 32, "candidate_topk_blocks": 8, "engram_compressed_vocab_size": 512,
        "dspark_noise_token_id": 501, "dspark_n_routed_experts": 8, "dspark_num_experts_per_tok": 2, "dspark_markov_rank": 16,
    }  # fmt: skip
    return data


def parse_options() -> argparse.Namespace:
    parser = rank_options(argparse.ArgumentParser())
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", default="", help="released layer numbers, all 40 when empty")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--drafts", type=int, default=5, help="tokens drafted per step; 0 leaves the draft stages out")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no new figure is begun")
    parser.add_argument("--exchange", default="auto", help="engine.expert_exchange of all parts but `routes`")
    parser.add_argument("--began", type=float, default=time.monotonic())
    options = parser.parse_args()
    if wrong := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"no parts {', '.join(sorted(wrong))}; there are {', '.join(PARTS)}")
    return options


def main() -> None:
    options = parse_options()
    if options.rank >= 0:
        return run_rank(options.rank, options)
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("rank-*.json"):
        old.unlink()
    layers = [int(n) for n in options.layers.split(",")] if options.layers else list(range(40))
    data = excerpt(layers, stages=3 if options.drafts else 0, engram_rows=997 if options.device == "cpu" else 1_000_000)
    data = small(data) if options.device == "cpu" else data
    model, meeting = write_excerpt(options.out / "model", data), options.out / f"meeting-{os.getpid()}"
    more = [f"--{name}={getattr(options, name)}" for name in ("ranks", "parts", "drafts", "budget", "began", "exchange")]
    commands = [[*rank_command("tests.gpu.whole_model", options, rank, model, meeting), *more] for rank in range(options.ranks)]
    codes: list[int] = []
    try:
        codes = run_together(commands, own_gpus=options.device == "cuda", until=options.began + options.budget + GRACE_S)
    finally:
        failed = show(options, data)
    if any(codes) or failed:
        sys.exit(f"ranks ended with {codes}; parts that failed: {', '.join(failed) or 'none'}")


def show(options: argparse.Namespace, data: dict[str, Any]) -> list[str]:
    """Prints the tables. Returns the parts that failed on a rank."""
    from tests.gpu.whole_session import SIZES
    from tests.gpu.whole_table import failed_parts, tables

    lines = list(tables(options.out, parse_config(data), SIZES[options.device], options.ranks, options.drafts))
    (options.out / "tables.txt").write_text("\n".join(lines) + "\n")
    print(*lines, f"{time.monotonic() - options.began:.0f} s", sep="\n", flush=True)
    return failed_parts(options.out)


if __name__ == "__main__":
    main()
