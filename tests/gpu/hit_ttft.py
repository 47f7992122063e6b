"""What a hit in the host cache costs until the first token, at the released shapes: `python -m tests.gpu.hit_ttft OUT [--device cpu]`.

A few layers with random weights, host cache with copies by a kernel. For each length the engine answers in turn a prompt whose beginning is
in the cache, a cold prompt as short as what the hit computes anew (must: hit over it at most 1.25), and the whole prompt cold. Every hit is
a restore from host memory. Prints a table and leaves records in `OUT/hit_ttft.jsonl`. A second table divides a hit and a short prompt: what
the host does until the model is asked, and what kernels take on the device, by their names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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


# What a hit adds -> parts of the names of its kernels.
KERNELS = {"copies": ("copy_pages", "page_copy", "Memcpy"), "search": ("score", "select", "place", "entries_of", "amax", "reduce")}


class HostTimes:
    """Milliseconds that a request spends in some calls before the model is asked."""

    def __init__(self, engine: Engine) -> None:
        self.ms: dict[str, float] = {}
        for owner, name in ((engine, "add_request"), (engine.cache, "plan"), (engine.cache, "restore")):
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self.ms[name] = self.ms.get(name, 0.0) + (time.perf_counter() - began) * 1e3
            return result

        return timed


@dataclass(slots=True)
class Answers:
    """Runs one request at a time."""

    engine: Engine
    host: HostTimes
    count: int = 0

    def ttft_ms(self, ids: list[int], *, read: bool = False, write: bool = False) -> tuple[float, int]:
        """Time until the first token is on the host, and how many tokens came from the cache."""
        self.count += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request, cached = Request(f"{self.count}", ids, params, cache_read=read, cache_write=write), 0
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        self.host.ms.clear()
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


def measure(answers: Answers, length: int, vocab: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)

    def ids(count: int) -> list[int]:
        return torch.randint(5, vocab - 100, (count,), generator=generator).tolist()

    prefix = ids(length)
    answers.ttft_ms(prefix, write=True)
    _, cached = answers.ttft_ms(prefix + ids(NEW_TOKENS), read=True)  # also compiles what is new at these sizes
    suffix = length + NEW_TOKENS - cached
    answers.ttft_ms(ids(suffix))
    times: dict[str, list[float]] = {"hit": [], "short": [], "short again": [], "cold": []}
    host: dict[str, list[float]] = {}
    for number in range(rounds):
        took, found = answers.ttft_ms(prefix + ids(NEW_TOKENS), read=True)
        assert found == cached, f"{found} tokens came from the cache, {cached} before"
        times["hit"].append(took)
        for name, ms in answers.host.ms.items():
            host.setdefault(name, []).append(ms)
        times["short"].append(answers.ttft_ms(ids(suffix))[0])
        times["short again"].append(answers.ttft_ms(ids(suffix))[0])
        if number < FEW_ROUNDS:
            times["cold"].append(answers.ttft_ms(prefix + ids(NEW_TOKENS))[0])
    medians = {name: statistics.median(values) for name, values in times.items()}
    spread = abs(medians["short again"] / medians["short"] - 1)
    divided: dict[str, Any] = {f"{name}_ms": statistics.median(values) for name, values in host.items()}
    if torch.cuda.is_available():
        hit, short = (kernels_of(answers, prompt, read) for prompt, read in ((prefix + ids(NEW_TOKENS), True), (ids(suffix), False)))
        divided |= by_part("hit", hit) | by_part("short", short)
        more = sorted(hit.keys() | short.keys(), key=lambda name: short.get(name, 0.0) - hit.get(name, 0.0))
        divided["more"] = {name[:90]: round(hit.get(name, 0.0) - short.get(name, 0.0), 3) for name in more[:8]}
    return {
        "length": length, "cached": cached, "suffix": suffix, "hit_ms": medians["hit"], "short_ms": medians["short"], "spread": spread,
        "cold_ms": medians["cold"], "hit_over_short": medians["hit"] / medians["short"], "gain": medians["cold"] / medians["hit"],
        "divided": divided,
    }  # fmt: skip


def kernels_of(answers: Answers, prompt: list[int], read: bool) -> dict[str, float]:
    """Kernel -> milliseconds on the device for one request. The profiler slows the host, not kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        answers.ttft_ms(prompt, read=read)
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in trace.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0.0) + (event.time_range.end - event.time_range.start) / 1e3
    return found


def by_part(title: str, kernels: dict[str, float]) -> dict[str, float]:
    parts = {part: sum(ms for name, ms in kernels.items() if any(word in name for word in words)) for part, words in KERNELS.items()}
    parts["other"] = sum(kernels.values()) - sum(parts.values())
    return {f"{title}_{part}_ms": ms for part, ms in parts.items()}


def division(found: dict[str, Any]) -> str:
    """One line a part, and the kernels that a hit has more of than a short prompt."""
    divided = dict(found["divided"])
    more = divided.pop("more", {})
    parts = ", ".join(f"{name.removesuffix('_ms')} {ms:.2f}" for name, ms in divided.items())
    return "\n".join([f"{found['length']:8,} ms: {parts}", *(f"{'':12}{ms:+8.3f} {name}" for name, ms in more.items())])


def line(found: dict[str, Any]) -> str:
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
    records: list[dict[str, Any]] = []
    host = HostTimes(engine)
    for length in lengths:
        found = measure(Answers(engine, host), length, engine.limits.vocab_size, rounds)
        records.append(found)
        print(line(found), flush=True)
        (options.out / "hit_ttft.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    print("\nWhat a hit is made of: the host before the model is asked, and kernels of a hit and of a short prompt")
    for found in records:
        print(division(found))
    engine.close()
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
