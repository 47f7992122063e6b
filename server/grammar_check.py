"""The front's side of checking grammars: one worker process, started for the first grammar, and a cache of its verdicts."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from server.constraints import Constraint
from server.errors import ApiError, BadRequest, Unavailable

MAX_RUNNING = 2  # grammars being compiled at the same time; each may take a processor for seconds
MAX_WAITING = 32
MAX_VERDICTS = 4096
MAX_REASON = 200
ANSWER_PATIENCE_S = 60.0  # loading the library takes seconds on a busy machine; a grammar itself is limited by the worker
log = logging.getLogger("front")


def grammars_available() -> bool:
    """Whether the grammar library is installed."""
    return importlib.util.find_spec("xgrammar") is not None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`error` empty: the grammar is sound. place: the field that holds the faulty schema, empty when it is not one of several."""

    error: str = ""
    place: str = ""


class GrammarCheck:
    """Everything happens on the event loop's thread."""

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._numbers = itertools.count(1)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._num_checks = 0
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def worker_pid(self) -> int | None:
        """Process id of the running worker."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def close(self) -> None:
        """End the worker and wait for it; a later check starts another."""
        if self._process is None or self._reader is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._reader

    async def check(self, constraint: Constraint, vocab_size: int, eos_id: int) -> None:
        """Return when a grammar can be given to a rank.

        Raises:
            BadRequest: `invalid_schema`, it is invalid, unbounded or too slow. ApiError: 429 too many checks. Unavailable: no worker.
        """
        key = _digest(constraint)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._examine(constraint, vocab_size, eos_id)
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(key)
        if verdict.error:
            where = verdict.place or constraint.param
            raise BadRequest(constraint.param, f"{where}: {verdict.error}", "invalid_schema")

    async def _examine(self, constraint: Constraint, vocab_size: int, eos_id: int) -> Verdict:
        if self._num_checks >= MAX_RUNNING + MAX_WAITING:
            raise ApiError(429, "queue_full", "too many grammars are being compiled", type="rate_limit_error", retry_after_s=2)
        self._num_checks += 1
        try:
            async with self._running:
                return await self._ask(constraint, vocab_size, eos_id)
        finally:
            self._num_checks -= 1

    async def _ask(self, constraint: Constraint, vocab_size: int, eos_id: int) -> Verdict:
        process = await self._worker(vocab_size, eos_id)
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        grammar = constraint.grammar
        parts = [[part.place, part.schema] for part in constraint.parts]
        request = {"number": number, "kind": grammar.kind, "text": grammar.text, "parts": parts}
        assert process.stdin is not None, "the worker was started with a pipe"
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            async with asyncio.timeout(ANSWER_PATIENCE_S):
                result = await answer
        except (ConnectionError, TimeoutError):
            raise Unavailable("grammar_worker", "the grammar could not be checked", retry_after_s=2) from None
        finally:
            self._waiting.pop(number, None)
        return Verdict(_shown(result["error"]), result["place"])

    async def _worker(self, vocab_size: int, eos_id: int) -> asyncio.subprocess.Process:
        """The worker, started when there is none."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                command = [sys.executable, "-m", "server.grammar_worker", self._model_dir]
                command += ["--vocab-size", str(vocab_size), "--eos", str(eos_id), "--parent", str(os.getpid())]
                pipe, environment = asyncio.subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
                self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
                self._reader = asyncio.create_task(self._read(self._process))
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand answers to those who wait, until the worker ends."""
        assert process.stdout is not None, "the worker was started with a pipe"
        async for line in process.stdout:
            answer = json.loads(line)
            future = self._waiting.get(answer["number"])
            if future is not None and not future.done():
                future.set_result(answer)
        log.warning("the grammar worker ended with %s", await process.wait())
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("the grammar worker ended"))


def _digest(constraint: Constraint) -> bytes:
    content = json.dumps([constraint.grammar.kind, constraint.grammar.text, [[part.place, part.schema] for part in constraint.parts]])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()


def _shown(error: str) -> str:
    """A reason that fits into an answer: the library quotes whole documents behind its own words."""
    text = error.partition(" The JSON string is")[0]
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."
