"""Grammars to automata over the model's vocabulary, compiled on threads beside the step loop. Wraps the xgrammar library.

The library loads at the first grammar: most processes never see one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.grammar_library import load_xgrammar
from engine.json_strings import check_strings, mend_characters
from engine.request import Grammar, GrammarKind, Request
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

CACHE_LIMIT_BYTES = 256 * 2**20  # compiled grammars that are kept; the largest schemas of tools take a few MiB
BUILD_THREADS = 2
COMPILER_THREADS = 2  # inside one compilation; wide vocabularies take seconds for long repetitions
BUILD_TIMEOUT_S = 20.0
# White space between JSON tokens: enough for indentation, and no room for a model that repeats blanks for ever.
MAX_WHITESPACE = 24
JSON_OBJECT_SCHEMA = '{"type": "object", "additionalProperties": true}'


def vocabulary_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """What every id means to a grammar. [vocab_size].

    Added tokens are no text: they get bytes that no UTF-8 text contains, so that a grammar reaches them only by naming their id.
    Ids without a token get nothing and are never allowed.
    """
    added = frozenset(tokenizer.added.values())
    return [_token(tokenizer, token_id, added) for token_id in range(vocab_size)]


def _token(tokenizer: Tokenizer, token_id: int, added: frozenset[int]) -> bytes:
    if token_id in added:
        return b"\xff\xfe" + str(token_id).encode()
    return tokenizer.token_bytes(token_id)


class GrammarCompiler:
    """Compiles for one vocabulary and remembers results up to `cache_limit_bytes`. Safe to use from several threads."""

    def __init__(self, vocabulary: Sequence[bytes], stop_token_ids: Sequence[int], cache_limit_bytes: int = CACHE_LIMIT_BYTES) -> None:
        xgrammar = load_xgrammar()
        info = xgrammar.TokenizerInfo(
            list(vocabulary), xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=list(stop_token_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=COMPILER_THREADS, cache_limit_bytes=cache_limit_bytes)

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises ValueError with the library's reason when the text is no valid grammar of its kind."""
        try:
            return self._compile(grammar.kind, grammar.text)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(_reason(error)) from error

    def _compile(self, kind: GrammarKind, text: str) -> xgrammar.CompiledGrammar:
        match kind:
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(text)
            case GrammarKind.EBNF:
                return self._compiler.compile_grammar(text)
        # The library reads what it prints, so that its grammar can be mended in between.
        return self._compiler.compile_grammar(mend_characters(str(_json_grammar(kind, text))))

    @property
    def cache_bytes(self) -> int:
        return self._compiler.get_cache_size_bytes()


def _json_grammar(kind: GrammarKind, text: str) -> xgrammar.Grammar:
    xgrammar = load_xgrammar()
    if kind is GrammarKind.STRUCTURAL_TAG:
        return xgrammar.Grammar.from_structural_tag(text)
    schema = JSON_OBJECT_SCHEMA if kind is GrammarKind.JSON_OBJECT else text
    try:
        check_strings(json.loads(schema))
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error
    return xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)


def check_schema_text(text: str) -> None:
    """Raises ValueError when a JSON schema has no grammar. Independent of the vocabulary, so it takes far less than compiling."""
    try:
        _json_grammar(GrammarKind.JSON_SCHEMA, text)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """The library's message without its time stamp and source position."""
    text = " ".join(str(error).split())
    head, found, tail = text.partition(".cc:")
    return tail.partition(": ")[2] or text if found and head.startswith("[") else text


@dataclass(frozen=True, slots=True)
class Build:
    """One finished build: exactly one of `compiled` and `error` is set. submitted_s: of the engine's clock."""

    request: Request
    submitted_s: float
    compiled: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Pending:
    request: Request
    future: Future[Any]
    submitted_s: float


class GrammarBuilds:
    """Grammars of requests that wait for them. One thread submits and polls; the compiler works on threads of its own."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], clock: Callable[[], float] = time.monotonic) -> None:
        """make_compiler: called once, on a build thread, when the first grammar arrives."""
        self._make_compiler = make_compiler
        self._clock = clock
        self._pool: ThreadPoolExecutor | None = None
        self._compiler: Future[GrammarCompiler] | None = None
        self._pending: dict[str, _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def submit(self, request: Request) -> None:
        """Start the build of a request's grammar."""
        assert request.grammar is not None, f"request {request.request_id} has no grammar"
        if self._pool is None or self._compiler is None:
            self._pool = ThreadPoolExecutor(BUILD_THREADS, thread_name_prefix="grammar")
            self._compiler = self._pool.submit(self._make_compiler)
        future = self._pool.submit(_compile, self._compiler, request.grammar)
        self._pending[request.request_id] = _Pending(request, future, self._clock())

    def cancel(self, request_id: str) -> bool:
        """Forget a build. False when there is none."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.future.cancel()
        return pending is not None

    def poll(self) -> list[Build]:
        """Builds that ended since the last call, in the order of their requests. Never waits."""
        now = self._clock()
        ended = [p for p in self._pending.values() if p.future.done() or now >= p.submitted_s + BUILD_TIMEOUT_S]
        for pending in ended:
            del self._pending[pending.request.request_id]
        return [_outcome(pending) for pending in ended]

    def wait(self, timeout_s: float) -> None:
        """Sleep until a build ends, at most `timeout_s`."""
        wait([pending.future for pending in self._pending.values()], timeout_s, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _compile(compiler: Future[GrammarCompiler], grammar: Grammar) -> Any:
    return compiler.result().compile(grammar)


def _outcome(pending: _Pending) -> Build:
    if not pending.future.done():
        return Build(pending.request, pending.submitted_s, error=f"the grammar was not compiled within {BUILD_TIMEOUT_S:g} s")
    error = pending.future.exception()
    if error is not None:
        return Build(pending.request, pending.submitted_s, error=f"the grammar cannot be compiled: {error}")
    return Build(pending.request, pending.submitted_s, compiled=pending.future.result())
