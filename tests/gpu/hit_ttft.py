"""What a hit in the host cache costs until the first token, at the released shapes: `python -m tests.gpu.hit_ttft OUT [--device cpu]`.

A few layers with random weights, host cache with copies by a kernel. For each length the engine answers in turn a prompt whose beginning is
in the cache, a cold prompt as short as what the hit computes anew (must: hit over it at most 1.25), and the whole prompt cold. Every hit is
a restore from host memory. Prints a table and leaves records in `OUT/hit_ttft.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.released import excerpt, write_excerpt
from engine.request import Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.gpu.whole_model import small

LAYERS = (2, 3, 20, 21)  # source and follower in the encoder half, source and follower in the decoder half
NEW_TOKENS, ROUNDS, FEW_ROUNDS = 300, 15, 3
MUST, AIM = 1.25, 1.08
# Length -> least speed-up of a hit over the whole prompt cold.
GAINS = {8_192: 3.0, 32_768: 10.0, 131_072: 40.0}


@dataclass(slots=True)
class Answers:
    """Runs one request at a time."""

    engine: Engine
    count: int = 0

    def ttft_ms(self, ids: list[int], *, read: bool = False, write: bool = False) -> tuple[float, int]:
        """Time until the first token is on the host, and how many tokens came from the cache."""
        self.count += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request, cached = Request(f"{self.count}", ids, params, cache_read=read, cache_write=write), 0
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        began, first = time.perf_counter(), 0.0
        self.engine.add_request(request)
        while self.engine.scheduler.has_work:
            for output in self.engine.step():
                assert not output.error, output.error
                if output.token_ids and not first:
                    first, cached = time.perf_counter() - began, output.cached_tokens or 0
        assert first, "no token came"
        return first * 1e3, cached


def make_engine(out: Path, device: str, longest: int) -> Engine:
    data = excerpt(LAYERS, stages=0)
    path = write_excerpt(out / "model", small(data) if device == "cpu" else data)
    config = EngineConfig(
        model=str(path), load_format="dummy", device=device, max_num_seqs=4, max_model_len=longest + 1024, spec=False, num_draft_tokens=0,
        num_blocks=2 * (longest + 1024) // 128 + 2, max_num_batched_tokens=min(longest, 32_768), yoco_mode="compact",
        yoco_keep_tokens=140,
    )  # fmt: skip
    return Engine(config, HiCacheConfig(size_gb=1.0 if device == "cuda" else 0.25, transfer="kernel", pin="blocking"))


def measure(answers: Answers, length: int, vocab: int, rounds: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(length)

    def ids(count: int) -> list[int]:
        return torch.randint(5, vocab - 100, (count,), generator=generator).tolist()

    prefix = ids(length)
    answers.ttft_ms(prefix, write=True)
    _, cached = answers.ttft_ms(prefix + ids(NEW_TOKENS), read=True)  # also compiles what is new at these sizes
    suffix = length + NEW_TOKENS - cached
    answers.ttft_ms(ids(suffix))
    times: dict[str, list[float]] = {"hit": [], "short": [], "short again": [], "cold": []}
    for number in range(rounds):
        took, found = answers.ttft_ms(prefix + ids(NEW_TOKENS), read=True)
        assert found == cached, f"{found} tokens came from the cache, {cached} before"
        times["hit"].append(took)
        times["short"].append(answers.ttft_ms(ids(suffix))[0])
        times["short again"].append(answers.ttft_ms(ids(suffix))[0])
        if number < FEW_ROUNDS:
            times["cold"].append(answers.ttft_ms(prefix + ids(NEW_TOKENS))[0])
    medians = {name: statistics.median(values) for name, values in times.items()}
    spread = abs(medians["short again"] / medians["short"] - 1)
    return {
        "length": length, "cached": cached, "suffix": suffix, "hit_ms": medians["hit"], "short_ms": medians["short"], "spread": spread,
        "cold_ms": medians["cold"], "hit_over_short": medians["hit"] / medians["short"], "gain": medians["cold"] / medians["hit"],
    }  # fmt: skip


def line(found: dict[str, float]) -> str:
    counts = f"{found['length']:8,.0f}{found['cached']:8,.0f}{found['suffix']:8.0f}"
    hit = f"{found['hit_ms']:9.2f}{found['short_ms']:10.2f}{100 * found['spread']:7.1f}{found['hit_over_short']:11.3f}"
    return f"{counts}{hit}{found['cold_ms']:9.1f}{found['gain']:7.1f}{GAINS.get(int(found['length']), 0.0):6.0f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lengths, rounds = (list(GAINS), ROUNDS) if options.device == "cuda" else ([1024], 2)
    began = time.monotonic()
    engine = make_engine(options.out, options.device, max(lengths))
    print(f"{len(LAYERS)} layers loaded in {time.monotonic() - began:.0f} s; a hit over a cold prompt as short: must {MUST}, aim {AIM}")
    print("  length  cached  suffix   hit ms  short ms  a/a %  hit/short  cold ms   gain  must")
    records = []
    for length in lengths:
        found = measure(Answers(engine), length, engine.limits.vocab_size, rounds)
        records.append(found)
        print(line(found), flush=True)
        (options.out / "hit_ttft.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    engine.close()
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
