"""A long simulated life of one rank: the real scheduler, block pool and prefix cache on a fake clock and a fake device.

Talks go on, prompts come again, clients leave, blocks run out, pages are evicted, bytes are changed, copies fail, and now and then the rank
is killed and started again on the segment that it left. `python -m tests.engine.cache_soak STEPS [SEED]` prints what happened.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engine.batch import StepKind
from engine.errors import ConfigError
from engine.prefix_cache import PrefixCache
from engine.prefix_plan import Plan
from engine.request import FinishReason, Output, Request, SamplingParams, Sequence
from engine.scheduler import Scheduler
from engine.step import Sampled
from hicache.config import HiCacheConfig
from hicache.host_pool import Owner
from hicache.ranking import DEFAULT_PRIORITY
from hicache.segment import CacheHome
from tests.engine.simulation import FakeClock, check_blocks, check_step, expected_tokens, make_scheduler, next_token
from tests.hicache.fake_kv import FakeKV

BLOCK, KEEP, FRAME, NUM_FRAMES = 4, 6, 4096, 60
MAX_LEN, MOST_TALKS, MOST_LIVE = 96, 12, 14
STEP_S = 0.01
# Chances per step.
ARRIVAL, ABORT, FAULT, KEPT, FORGET, KILL = 0.15, 0.02, 0.0005, 0.002, 0.00005, 0.0003


class WatchedCache(PrefixCache):
    """Checks every restore: its length obeys the rule, and what it brought is what a forward pass would have left."""

    def restore(self, seq: Sequence, plan: Plan) -> None:
        super().restore(seq, plan)
        tokens, kv = seq.num_computed, self.mover._kv
        assert isinstance(kv, FakeKV)
        assert tokens % BLOCK == 0, f"{tokens} tokens are no whole pages"
        assert tokens == 0 or tokens <= seq.prefill_len - KEEP, f"{tokens} of {seq.prefill_len} tokens were restored"
        if tokens:
            stored, block = seq.token_ids[:tokens], kv.blocks[seq.block_table[tokens // BLOCK - 1]]
            assert block.equal(kv.page_bytes(stored)), "a page holds other bytes"
            assert kv.loaded[seq.state_slot] == (tokens, bytes(kv.window_bytes(stored).tolist())), "a state holds other bytes"


@dataclass(frozen=True, slots=True)
class Reading:
    """What the process holds when nothing runs."""

    step: int
    objects: int
    blocks: int
    rss_bytes: int

    def line(self) -> str:
        return f"step {self.step:>9,}: {self.objects:,} objects, {self.blocks:,} blocks, {self.rss_bytes / 1e6:.1f} MB"


@dataclass
class Life:
    """One rank through all its restarts. `live`: requests without their final output, with what has come of each.

    haste: how many times as often as in a long life faults, pins, resets and restarts come.
    """

    directory: Path
    seed: int
    haste: float = 1.0
    say: Callable[[str], None] = lambda _line: None
    live: dict[str, tuple[Sequence, list[int]]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)
    readings: list[Reading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw, self.clock = random.Random(self.seed), FakeClock()
        self.systems = [self._tokens(length) for length in (16, 22, 30)]
        self.talks: list[list[int]] = []
        self.asked: list[list[int]] = [[2] * 20]
        self.total = 0
        self._start()

    def _start(self) -> None:
        self.kv = FakeKV(BLOCK, num_blocks=48, block_bytes=32, state_bytes=64)
        policy = {"eviction": self.draw.choice(("lru", "slru")), "store_threshold": self.draw.choice((1, 1, 2))}
        config = HiCacheConfig(min_restore_tokens=1, audit="full", herd_min_tokens=16, state_interval_tokens=32, **policy)
        home = CacheHome(self.directory, "dix-soak", 0, 1, b"s" * 32)
        self.cache = WatchedCache(config, self.kv, "model", KEEP, num_bytes=NUM_FRAMES * FRAME, clock=self.clock, home=home)  # type: ignore[arg-type]
        self.scheduler: Scheduler = make_scheduler(
            cache=self.cache, any_=2, attempt=5, clock=self.clock,
            max_model_len=MAX_LEN, max_num_seqs=5, max_num_batched_tokens=24, num_blocks=48, num_state_slots=8, block_size=BLOCK,
        )  # fmt: skip

    # ---- what happens

    def run(self, steps: int, check_every: int, readings: int) -> None:
        for step in range(1, steps + 1):
            self._happen()
            self._step()
            if step % check_every == 0:
                self.check()
            if step % (steps // readings) == 0:
                self._read(step)

    def _happen(self) -> None:
        chance = self.draw.random
        if chance() < ARRIVAL and len(self.live) < MOST_LIVE:
            self._send()
        if chance() < ABORT and self.live:
            name = self.draw.choice(list(self.live))
            self.left.add(name)
            assert self.scheduler.abort(name)
        if chance() < FAULT * self.haste:
            self._break_something()
        if chance() < KEPT * self.haste:
            self._keep()
        if chance() < FORGET * self.haste:
            self.cache.reset()
            self.seen["resets"] += 1
        if chance() < KILL * self.haste:
            self._kill()

    def _send(self) -> None:
        self.total += 1
        params = SamplingParams(temperature=0, max_tokens=self.draw.randint(1, 24))
        writes, salt = self.draw.random() > 0.05, self.draw.choice(("", "", "", "b"))
        priority, seconds = self.draw.choice(((DEFAULT_PRIORITY, math.inf),) * 5 + ((0, math.inf), (60, 1.0), (90, 3.0), (100, math.inf)))
        request = Request(
            f"r{self.total}",
            self._prompt(),
            params,
            cache_write=writes,
            cache_salt=salt,
            cache_scope="scope",
            cache_priority=priority,
            cache_priority_s=seconds,
        )
        ids = list(request.prompt_token_ids)
        seq = Sequence(self.total, request, self.clock.now, 0, list(ids), len(ids), len(ids))
        self.live[request.request_id] = (seq, [])
        self.scheduler.add(seq)

    def _prompt(self) -> list[int]:
        """A talk that goes on, one that was sent before, or a new one under one of three system texts."""
        kind = self.draw.random()
        if kind < 0.5 and self.talks:
            prompt = self.draw.choice(self.talks) + self._tokens(self.draw.randint(2, 12))
        elif kind < 0.7:
            prompt = self.draw.choice(self.asked)
        else:
            prompt = self.draw.choice(self.systems) + self._tokens(self.draw.randint(1, 20))
        prompt = prompt[: MAX_LEN - 12]
        self._remember(self.asked, prompt)
        return prompt

    def _remember(self, kept: list[list[int]], tokens: list[int]) -> None:
        kept.append(tokens)
        if len(kept) > MOST_TALKS:
            kept.pop(self.draw.randrange(MOST_TALKS))

    def _tokens(self, length: int) -> list[int]:
        return [self.draw.randint(2, 29) for _ in range(length)]

    def _break_something(self) -> None:
        kind = self.draw.choice(("flip", "flip", "refuse", "short"))
        try:
            self.cache.inject_fault(kind, target=self.draw.choice(("page", "state")))
        except ConfigError:
            return  # nothing is stored yet
        self.seen[f"fault {kind}"] += 1

    def _keep(self) -> None:
        try:
            self.cache.keep(self.draw.choice(self.asked), "", ttl_s=2.0)
        except ConfigError:
            return  # as much is kept as may be
        self.seen["kept"] += 1

    def _kill(self) -> None:
        """The process is gone with everything that ran; its segment stays."""
        self._count()
        assert self.cache.mover.segment is not None
        self.cache.mover.segment.close()
        self.live.clear()
        self.left.clear()
        self._start()
        self.seen["restarts"] += 1
        self.seen["recovered pages"] += self.cache.sources.recovery.pages
        self.cache.cache.check()

    # ---- a step

    def _step(self) -> None:
        self.clock.now += STEP_S
        self.cache.begin_step(decoding=bool(self.scheduler.running))
        step = self.scheduler.schedule()
        outputs = self.scheduler.take_finals()
        if step.seqs:
            check_step(self.scheduler, step)
            if step.kind is StepKind.PREFILL:
                for seq, piece in zip(step.seqs, step.slices, strict=True):
                    self.kv.compute(seq, piece.start, piece.end)
            outputs += self.scheduler.commit(step, Sampled([[next_token(seq.token_ids)] for seq in step.rows]))
        for output in outputs:
            self._take(output)

    def _take(self, output: Output) -> None:
        """An unknown name here would be a second final output."""
        seq, tokens = self.live[output.request_id]
        tokens += output.token_ids
        if output.finish_reason is None:
            return
        del self.live[output.request_id]
        expected = expected_tokens(seq, MAX_LEN)
        whole = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert tokens == (expected if whole else expected[: len(tokens)]), f"{output.request_id} differs from an undisturbed run"
        assert whole or output.request_id in self.left, f"{output.request_id} ended by {output.finish_reason}"
        self.left.discard(output.request_id)
        self.seen[str(output.finish_reason)] += 1
        if whole:
            self._remember(self.talks, [*seq.request.prompt_token_ids, *tokens])

    # ---- what must hold

    def check(self) -> None:
        """Conservation of blocks and frames, prefix closure, pins by live sequences alone, counters that fit each other."""
        check_blocks(self.scheduler)
        self.cache.cache.check()
        stats = self.cache.stats()
        assert not stats["switched_off"]
        assert stats["hits_total"] <= stats["lookups_total"]
        assert stats["hit_tokens_total"] <= stats["lookup_tokens_total"]
        assert stats["pinned_sequences"] <= len(self.live)
        known = {seq.seq_id for seq, _ in self.live.values()}
        assert {
            *self.cache._planned,
            *self.cache._active,
            *self.cache._running,
            *self.cache._sequence_keys._known,
            *self.cache.lookup.fetched,
        } <= known

    def drain(self, most_steps: int = 5000) -> None:
        """Without new requests everything ends, and then nothing is held: no block, no slot, no reserved frame, no pin but kept ones."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self._step()
        for output in self.scheduler.take_finals():
            self._take(output)
        assert not self.live, f"{len(self.live)} requests do not end"
        self.clock.now += 10.0  # what was kept for two seconds
        self._step()
        self.check()
        cache, blocks = self.cache.cache, self.scheduler.blocks
        assert blocks.blocks.num_used == blocks.slots.num_used == 0
        assert cache.pool.count(Owner.RESERVED) == cache.pool.count(Owner.LEASED) == 0
        index, pages = cache.index, cache.index.pages()
        assert not [frame for frame in [*pages, *index.states.on(pages)] if index.ref[frame]], "pages or states are pinned"

    def _read(self, step: int) -> None:
        self.drain()
        gc.collect()
        self.readings.append(Reading(step, len(gc.get_objects()), sys.getallocatedblocks(), psutil.Process().memory_info().rss))
        self.say(self.readings[-1].line())

    def _count(self) -> None:
        """Counters of this incarnation, before it goes."""
        stats, counters = self.cache.stats(), self.scheduler.counters
        self.seen["preemptions"] += counters.preemptions
        self.seen["prompt steps"] += counters.prompt_steps
        self.seen["decode steps"] += counters.decode_steps
        for name in ("hits_total", "hit_tokens_total", "evictions_total", "checksum_errors_total", "copy_errors_total", "holds_total"):
            self.seen[name.removesuffix("_total").replace("_", " ")] += stats[name]
        for reason in ("aborted", "tenant"):
            self.seen[f"misses {reason}"] += stats["miss_total"][reason]
        self.seen["refused priorities"] += stats["priorities_refused_total"]
        assert stats["token_errors_total"] == 0, "a page lay under the key of other tokens"

    def close(self) -> None:
        self._count()
        self.cache.close()


def check_flat(readings: list[Reading]) -> None:
    """Objects, allocated blocks and memory of the last quarter against the second: the first is the warm-up."""
    quarter = len(readings) // 4
    early, late = readings[quarter : 2 * quarter], readings[-quarter:]
    for name, most in (("objects", 300), ("blocks", 3000), ("rss_bytes", 4 * 2**20)):
        before, after = (max(getattr(reading, name) for reading in part) for part in (early, late))
        assert after <= before + most, f"{name} grow from {before:,} to {after:,}"


def soak(life: Life, steps: int, *, check_every: int = 50, readings: int = 20) -> Life:
    try:
        life.run(steps, check_every, readings)
        life.drain()
    finally:
        life.close()
    return life


def main() -> None:
    steps, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="dix-soak-") as directory:
        life = soak(Life(Path(directory), seed, say=lambda line: print(line, flush=True)), steps)
    print(f"{steps:,} steps, {life.total:,} requests, {time.process_time() - began:.0f} s of CPU time")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(life.seen.items())))
    check_flat(life.readings)
    print("flat")


if __name__ == "__main__":
    main()
