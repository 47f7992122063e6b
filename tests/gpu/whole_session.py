"""One rank of a run of the whole model: its runner, and how it measures in step with the others (`tests/gpu/whole_model.py`)."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.batch import Batch, LogitRows, SequenceSlice, StepKind
from engine.config import EngineConfig
from engine.cuda_graph import NullRecorder
from engine.distributed import GlooGroup
from engine.layer_runs import LayerRuns
from engine.model_runner import ModelRunner
from engine.models.draft import DraftSlice
from tests.gpu.ranks import exchanging_alone

PEER_S = 150.0  # a rank that waits longer for another one gives up


@dataclass(frozen=True, slots=True)
class Sizes:
    """batches: sequences of all ranks together. context: tokens of each, `suffix` of them not shared with others. room: tokens that they
    may grow by. prompts: lengths of long prompts; hits: of prefixes in the host cache, with so many new tokens behind them. own_chunk,
    joint_chunk: tokens of a prompt step of one rank, and of all together. keep: prompt tokens that decoder layers see.
    """

    batches: tuple[int, ...]
    context: int
    suffix: int
    room: int
    prompts: tuple[int, ...]
    hits: tuple[int, ...]
    new_tokens: int
    own_chunk: int
    joint_chunk: int
    keep: int
    steps: int
    cache_gb: float


SIZES = {
    "cuda": Sizes((1, 8, 64, 256), 8_192, 256, 1_024, (32_768, 131_072), (8_192, 32_768), 300, 16_384, 32_768, 140, 20, 1.0),
    "cpu": Sizes((1, 2, 5), 384, 128, 256, (256, 512), (256, 384), 70, 128, 256, 140, 6, 0.05),
}


@dataclass(slots=True)
class Session:
    """One rank while it measures. report: all that it has found so far, which `save` writes. asker: its engine, made when first wanted."""

    rank: int
    options: argparse.Namespace
    sizes: Sizes
    group: GlooGroup
    runner: ModelRunner
    drafts: int
    report: dict[str, Any] = field(default_factory=dict)
    asker: Any = None

    @property
    def ranks(self) -> int:
        return self.group.size

    def mine(self, total: int) -> int:
        """Sequences of this rank of `total` in all."""
        return len(range(self.rank, total, self.ranks))

    def goes_on(self) -> bool:
        """Whether there is time for one more figure. The ranks agree on it; what was found before is written first."""
        if self.options.device == "cuda":
            self.report["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.save()
        late = time.monotonic() > self.options.began + self.options.budget
        return not self.group.max([int(late)])[0]

    def save(self) -> None:
        path = self.options.out / f"rank-{self.rank}.json"
        path.with_suffix(".new").write_text(json.dumps(self.report))
        path.with_suffix(".new").replace(path)

    def synchronize(self) -> None:
        if self.options.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], Any]) -> float:
        """Milliseconds of a call that all ranks begin together, the device's work included."""
        self.synchronize()
        self.group.max([0])
        began = time.perf_counter()
        call()
        self.synchronize()
        return (time.perf_counter() - began) * 1e3

    def median(self, call: Callable[[], Any]) -> float:
        """Of `sizes.steps` calls, two more before them."""
        return statistics.median([self.timed(call) for _ in range(self.sizes.steps + 2)][2:])

    def slices(self, total: int, rows: int) -> list[SequenceSlice]:
        """Of this rank's sequences, `rows` rows at the end of each context."""
        per_seq, context = (self.sizes.context + self.sizes.room) // 128, self.sizes.context
        history = (5,) * self.runner.limits.ngram_history
        slices = []
        for i in range(self.mine(total)):
            table = list(range(1 + i * per_seq, 1 + (i + 1) * per_seq))
            ids = [7 + i + j for j in range(rows)]
            slices.append(SequenceSlice(ids, context - rows, context, table, 1 + i, history, logit_rows=LogitRows.ALL))
        return slices

    def step(self, total: int, rows: int = 1) -> Callable[[], Any]:
        """A decode step of `total` sequences, or a verify step of `rows` rows each. A rank without any takes part."""
        kind = StepKind.DECODE if rows == 1 else StepKind.VERIFY
        slices = self.slices(total, rows)
        if not slices:
            return lambda: self.runner.join(kind)
        batch = Batch(kind, slices)
        return lambda: self.runner.run(batch)

    def draft(self, total: int) -> Callable[[], Any]:
        slices = [DraftSlice(7, self.sizes.context - 2, 1 + i) for i in range(self.mine(total))]
        return lambda: self.runner.draft_greedy(slices) if slices else None

    def prefill(self, length: int, chunk: int, owner: bool) -> None:
        """A prompt in chunks, on slot 1 and the first blocks; a rank that does not own it takes part."""
        table, back = list(range(1, length // 128 + 2)), self.runner.limits.ngram_history
        for start in range(0, length, chunk):
            end = min(length, start + chunk)
            if not owner:
                self.runner.join(StepKind.PREFILL)
                continue
            ids, history = ([5 + i % 400 for i in range(first, last)] for first, last in ((start, end), (max(0, start - back), start)))
            rows = LogitRows.LAST if end == length else LogitRows.NONE
            self.runner.run(Batch(StepKind.PREFILL, [SequenceSlice(ids, start, length, table, 1, tuple(history), logit_rows=rows)]))

    @contextmanager
    def prefilling_alone(self) -> Iterator[None]:
        """Meanwhile every rank computes its own prompts, although the runner could share them: one load measures both."""
        shared, self.runner._shared = self.runner._shared, None
        try:
            yield
        finally:
            self.runner._shared = shared


def engine_config(options: argparse.Namespace, sizes: Sizes, drafts: int) -> EngineConfig:
    """Of one rank. Its part of the cache holds its share of the largest batch, or the longest prompt."""
    ranks = options.ranks
    most = -(-max(sizes.batches) // ranks)
    longest = max(*sizes.prompts, sizes.context + sizes.room, max(sizes.hits) + sizes.new_tokens)
    # A third more than sequences fill: behind nine tenths no new one is admitted.
    blocks = max(most * ((sizes.context + sizes.room) // 128 + 2) * 4 // 3, longest // 128 * 4 // 3)
    return EngineConfig(
        model=options.model, load_format="dummy", device=options.device, precision="B", dp=ranks, ep=ranks, cp=ranks,
        max_num_seqs=most, num_blocks=ranks * blocks + 1, max_num_batched_tokens=sizes.own_chunk, max_model_len=longest + 128,
        yoco_mode="compact", yoco_keep_tokens=sizes.keep, prefill_any_interval=2, spec=drafts > 0, num_draft_tokens=drafts,
        expert_exchange=options.exchange, collective_timeout_s=PEER_S,
        force_accept_length=1.0 if drafts else 0.0, enforce_eager=options.device == "cpu",
        # As few recordings as serve the batches and their verify steps.
        cudagraph_batch_size_interval=max(1, most * (1 + drafts) // 4),
    )  # fmt: skip


def make_session(rank: int, options: argparse.Namespace) -> Session:
    """Loads and records. On CPUs nothing is recorded by itself; there a recorder that records nothing runs the same code."""
    cuda = options.device == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    sizes = SIZES[options.device]
    began = time.monotonic()
    group = GlooGroup(rank, options.ranks, init_file=options.meeting, timeout_s=PEER_S)
    with nullcontext() if options.ranks > 1 else exchanging_alone():
        runner = ModelRunner(
            engine_config(options, sizes, options.drafts), group=group, draft=options.drafts > 0, recorder=None if cuda else NullRecorder()
        )
    LayerRuns(runner, 1, sizes.context)  # fills the cache with random rows
    session = Session(rank, options, sizes, group, runner, options.drafts)
    session.report |= {"load_s": time.monotonic() - began, "recordings": [str(r) for r in runner.recordings], "path": runner.path}
    session.report["memory_gib"] = torch.cuda.memory_allocated() / 2**30 if cuda else 0.0
    session.save()
    return session
