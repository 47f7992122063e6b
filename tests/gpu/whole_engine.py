"""What a run of the whole model measures through engines: tokens per second with forced accept lengths, first tokens of prompts and hits.

One engine per rank over the loaded runner, with a host cache; all ranks step together until nobody has work.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from engine.engine import Engine
from engine.forced_accept import ForcedAccept
from engine.request import Output, Request, SamplingParams
from hicache.config import HiCacheConfig
from tests.gpu.whole_session import Session

LENGTHS = (2.8, 3.51)  # accept lengths that public figures name
ROUNDS = 3
START_STEPS = 200  # until all sequences of a batch run; a prompt step takes dozens of them


class Asker:
    """Sends requests to a rank's engine. Every rank makes the same calls; a rank without a prompt takes part."""

    def __init__(self, session: Session) -> None:
        self.session = session
        config = replace(session.runner.config, cp=1)  # its prompts are its own
        cache = HiCacheConfig(size_gb=session.sizes.cache_gb, transfer="kernel", pin="blocking")
        self.engine = Engine(config, cache, session.group, runner=session.runner)
        self._random = torch.Generator().manual_seed(session.rank)
        self._count = 0

    def ids(self, count: int) -> list[int]:
        """Tokens that no other rank and no other prompt has in this order."""
        return torch.randint(5, self.session.runner.limits.vocab_size - 100, (count,), generator=self._random).tolist()

    def add(self, ids: list[int], max_tokens: int, read: bool, write: bool) -> None:
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(Request(f"{self._count}", ids, params, cache_read=read, cache_write=write))

    def first_token(self, ids: list[int] | None, *, read: bool = False, write: bool = False) -> tuple[float, int]:
        """Milliseconds until this rank's first token is on the host, and how many tokens came from the cache; zeros without a prompt."""
        self.session.synchronize()
        self.session.group.max([0])
        began, first, cached = time.perf_counter(), 0.0, 0
        if ids is not None:
            self.add(ids, 1, read, write)
        while True:
            for output in self.engine.step():
                assert not output.error, output.error
                if output.token_ids and not first:
                    first, cached = time.perf_counter() - began, output.cached_tokens or 0
            if self.engine.idle:
                return first * 1e3, cached

    def start(self, prefix: list[int], count: int) -> None:
        """Let `count` sequences of this rank decode behind a prefix of the cache. Plain steps meanwhile: those that run grow the least."""
        drafter, self.engine.drafter = self.engine.drafter, None
        for _ in range(count):
            self.add(prefix + self.ids(self.session.sizes.suffix), 10**6, True, False)
        for _ in range(START_STEPS):
            self.engine.step()
            [missing] = self.session.group.max([count - len(self.engine.scheduler.running)])
            if not missing:
                self.engine.drafter = drafter
                return
        raise AssertionError(f"a rank still lacks {missing} running sequences after {START_STEPS} steps")

    def stop(self) -> None:
        for seq in list(self.engine.scheduler.running):
            self.engine.abort(seq.request.request_id)
        while True:
            self.engine.step()
            if self.engine.idle:
                return

    def decode(self, length: float) -> dict[str, float]:
        """Steps of the running sequences. length: forced accept length, 0 for plain steps."""
        drafter = self.engine.drafter
        self.engine.drafter = drafter if length else None
        self.engine._step_runner.sampler.forced = ForcedAccept(length) if length else None
        outputs: list[Output] = []
        times = []
        for number in range(self.session.sizes.steps + 2):
            began = time.perf_counter()
            found = self.engine.step()
            took = time.perf_counter() - began
            if number >= 2:
                times.append(took)
                outputs += found
        self.engine.drafter = drafter
        verified = [output for output in outputs if output.drafted]
        return {
            "step": statistics.median(times) * 1e3,
            "seconds": sum(times),
            "tokens": sum(len(output.token_ids) for output in outputs),
            "cached": min((seq.cached_tokens or 0 for seq in self.engine.scheduler.running), default=0),
            "accept": 1 + sum(output.accepted for output in verified) / len(verified) if verified else 0.0,
        }


def make_asker(session: Session) -> Asker:
    if session.asker is None:
        session.asker = Asker(session)
    asker: Asker = session.asker
    return asker


def drafts(session: Session) -> None:
    """Whole steps of engines, plain and with forced accept lengths: scheduling, drafts, forward pass, choice of tokens."""
    found = session.report.setdefault("drafts", {})
    if not session.drafts:
        return
    with session.prefilling_alone():
        asker = make_asker(session)
        prefix = asker.ids(session.sizes.context - session.sizes.suffix)
        asker.first_token(prefix, write=True)
        for total in session.sizes.batches:
            if not session.goes_on():
                return
            asker.start(prefix, session.mine(total))
            for length in (0.0, *(length for length in LENGTHS if length <= 1 + session.drafts)):
                found[f"{total} {length:g}"] = asker.decode(length)
            asker.stop()


def ttft(session: Session) -> None:
    """First tokens: a cold prompt of one rank, one of every rank at once, then hits of all ranks at once and of one."""
    found = session.report.setdefault("ttft", {})
    with session.prefilling_alone():
        asker = make_asker(session)
        for length in session.sizes.hits:
            if not session.goes_on():
                return
            prefix, new = asker.ids(length), session.sizes.new_tokens
            cold, _ = asker.first_token(prefix, write=True)  # also compiles what is new at these sizes
            figures: dict[str, Any] = found.setdefault(f"{length}", {"cold_all": cold})
            asker.first_token(prefix + asker.ids(new), read=True)
            hits = [asker.first_token(prefix + asker.ids(new), read=True) for _ in range(ROUNDS)]
            figures |= {"hit_all": statistics.median(ms for ms, _ in hits), "cached": min(cached for _, cached in hits)}
            if not session.goes_on():
                return
            figures["cold_all"] = asker.first_token(asker.ids(length))[0]
            alone = session.rank == 0
            figures["cold"] = asker.first_token(asker.ids(length) if alone else None)[0]
            hits = [asker.first_token(prefix + asker.ids(new) if alone else None, read=True) for _ in range(ROUNDS)]
            figures["hit"] = statistics.median(ms for ms, _ in hits)
