"""Tries grammars so that no rank has to: `python -m server.grammar_worker`. One child per grammar, with limits on time and memory.

Requests come as JSON lines on standard input, answers go as JSON lines to standard output. The process loads the library and the
vocabulary once and forks for every request; a child that exceeds a limit dies alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import selectors
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.grammar_compiler import GrammarCompiler, check_schema_text, vocabulary_bytes
from engine.request import Grammar, GrammarKind
from engine.structured_output import GrammarError, Matcher, num_words
from engine.tokenizer import Tokenizer
from server import parent_death

TIME_LIMIT_S = 5.0  # processor time, so that a verdict does not depend on what else the machine does
WALL_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 2**30
WALK_TOKENS = 256
SLOWEST_WALK_S = 1.0  # processor time; ordinary grammars take a hundredth, ambiguous ones grow with the cube of the length
_READ_BYTES = 65536
_MAX_TEXT = 1024  # characters of an answer's field


@dataclass(frozen=True, slots=True)
class _Child:
    number: int
    pid: int
    descriptor: int
    deadline_s: float


class Examiner:
    """What a child does: compile, then walk through the grammar as a sampler would."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        self._compiler = GrammarCompiler(vocabulary_bytes(tokenizer, vocab_size), [eos_id])
        self._vocab_size = vocab_size
        self._eos_id = eos_id

    def examine(self, grammar: Grammar, parts: list[list[str]]) -> dict[str, str]:
        """{"error", "place"} of the first problem; both empty when the grammar is sound. parts: (place, schema text) pairs."""
        for place, schema in parts:
            try:
                check_schema_text(schema)
            except ValueError as error:
                return {"error": str(error), "place": place}
        try:
            compiled = self._compiler.compile(grammar)
            self._walk(Matcher(compiled, Grammar(grammar.kind, grammar.text), [self._eos_id], self._vocab_size))
        except (ValueError, GrammarError) as error:
            return {"error": str(error), "place": ""}
        return {"error": "", "place": ""}

    def _walk(self, matcher: Matcher) -> None:
        """Random output of the grammar: it must have a next token everywhere, and soon.

        Raises:
            GrammarError: a dead end. ValueError: a mask takes too long.
        """
        import torch

        choose = random.Random(0)
        mask = torch.empty(num_words(self._vocab_size), dtype=torch.int32)
        started_s = time.process_time()
        for step in range(WALK_TOKENS):
            mask.fill_(-1)
            matcher.fill(mask)
            token = self._pick(mask, choose)
            if token == self._eos_id:
                return
            accepted = matcher.accept(token)
            assert accepted, f"token {token} is in the mask but refused"
            if time.process_time() - started_s > SLOWEST_WALK_S:
                raise ValueError(f"the grammar is too ambiguous: {step + 1} tokens took more than {SLOWEST_WALK_S:g} s")

    def _pick(self, mask: Any, choose: random.Random) -> int:
        """A random allowed token; the end only where nothing else may follow, so that the walk is long."""
        end_word, end_bit = divmod(self._eos_id, 32)
        without_end = mask.clone()
        without_end[end_word] &= ~(1 << end_bit) if end_bit < 31 else 2**31 - 1
        words: list[int] = without_end.nonzero()[:, 0].tolist()
        if not words:
            return self._eos_id
        mask = without_end
        word = choose.choice(words)
        bits = int(mask[word]) & 0xFFFFFFFF
        return 32 * word + choose.choice([bit for bit in range(32) if bits >> bit & 1])


class Server:
    """Reads requests, forks children, kills those that take too long, and passes answers on. One thread."""

    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._answers: dict[int, bytes] = {}
        self._input = b""

    def run(self) -> None:
        """Until standard input closes."""
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fd == 0:
                    if not self._read_requests():
                        return
                else:
                    self._read_answer(key.fd)
            self._kill_late()

    def _patience_s(self) -> float | None:
        if not self._children:
            return None
        return max(0.0, min(child.deadline_s for child in self._children.values()) - time.monotonic())

    def _read_requests(self) -> bool:
        data = os.read(0, _READ_BYTES)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._start(json.loads(line))
        return bool(data)

    def _start(self, request: dict[str, Any]) -> None:
        reader, writer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._child(request, writer, parent)
        os.close(writer)
        self._children[reader] = _Child(request["number"], pid, reader, time.monotonic() + WALL_LIMIT_S)
        self._answers[reader] = b""
        self._selector.register(reader, selectors.EVENT_READ)

    def _child(self, request: dict[str, Any], writer: int, parent: int) -> None:
        """Never returns."""
        try:
            parent_death.arm(parent)
            limit_resources()
            grammar = Grammar(GrammarKind(request["kind"]), request["text"])
            answer = self._examiner.examine(grammar, request["parts"])
        except MemoryError:
            os._exit(1)
        except BaseException as error:  # the boundary of a forked child: nothing may travel up into the copy of the parent's loop
            answer = {"error": f"{type(error).__name__}: {error}", "place": ""}
        # The library quotes whole documents, and the front reads lines up to a limit.
        answer = {name: text[:_MAX_TEXT] for name, text in answer.items()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)

    def _read_answer(self, descriptor: int) -> None:
        data = os.read(descriptor, _READ_BYTES)
        self._answers[descriptor] += data
        if not data:
            self._finish(self._children[descriptor])

    def _kill_late(self) -> None:
        now = time.monotonic()
        for child in [child for child in self._children.values() if child.deadline_s <= now]:
            os.kill(child.pid, signal.SIGKILL)
            self._finish(child)

    def _finish(self, child: _Child) -> None:
        """Answer for a child that is over or was killed."""
        self._selector.unregister(child.descriptor)
        os.close(child.descriptor)
        del self._children[child.descriptor]
        _, status = os.waitpid(child.pid, 0)
        try:
            answer = json.loads(self._answers.pop(child.descriptor))
        except ValueError:
            late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
            limit = f"it takes more than {TIME_LIMIT_S:g} s" if late else "it needs more than 1 GiB of memory"
            answer = {"error": f"{limit} to compile", "place": ""}
        sys.stdout.write(json.dumps({"number": child.number, **answer}) + "\n")
        sys.stdout.flush()


def limit_resources() -> None:
    """Memory beyond what the parent's copy has, processor time, and no core file."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_LIMIT_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIME_LIMIT_S), int(TIME_LIMIT_S) + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="server.grammar_worker")
    parser.add_argument("model", type=Path)
    for name in ("vocab-size", "eos", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args(arguments)
    parent_death.arm(options.parent)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Server(Examiner(Tokenizer.from_dir(options.model), options.vocab_size, options.eos)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
