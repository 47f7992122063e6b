"""Grammars tried out in a worker process: verdicts, limits, and a worker that dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from engine.request import Grammar, GrammarKind
from server.constraints import Constraint, Part
from server.errors import ApiError, BadRequest, Unavailable
from server.grammar_check import MAX_RUNNING, MAX_WAITING, GrammarCheck
from server.grammar_worker import MEMORY_LIMIT_BYTES, limit_resources
from tests.server.vectors import write_text_files

VOCAB, EOS = 4096, 1
# 3000 rules that refer to each other in a circle, each with a long repetition: minutes of compiling or ambiguous without end.
EXPLOSIVE = "root ::= " + " | ".join(f"r{i}" for i in range(3000)) + "\n"
EXPLOSIVE += "\n".join(f'r{i} ::= "a" r{(i + 1) % 3000} | [^]{{0,9999}} "{i}"' for i in range(3000))


def regex(pattern: str) -> Constraint:
    return Constraint(Grammar(GrammarKind.REGEX, pattern), "regex")


def ebnf(text: str) -> Constraint:
    return Constraint(Grammar(GrammarKind.EBNF, text), "ebnf")


def schema(value: object) -> Constraint:
    return Constraint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value)), "response_format")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def check(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GrammarCheck]:
    folder = tmp_path_factory.mktemp("model") / "text"
    write_text_files(Path(folder))
    made = GrammarCheck(str(folder))
    yield made
    await made.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


def worker_of(check: GrammarCheck) -> psutil.Process:
    assert check.worker_pid is not None
    return psutil.Process(check.worker_pid)


async def verdict(check: GrammarCheck, constraint: Constraint) -> str:
    """The refusal's message, empty when the grammar passes."""
    refusals = [e for e in await asyncio.gather(check.check(constraint, VOCAB, EOS), return_exceptions=True) if e is not None]
    for error in refusals:
        assert isinstance(error, BadRequest), error
        assert (error.code, error.param) == ("invalid_schema", constraint.param)
    return refusals[0].message if refusals else ""


@pytest.mark.parametrize(
    "constraint",
    [
        regex("[a-z]{1,10000}"),
        ebnf('root ::= "a" root | "b"'),
        schema({"type": "object", "properties": {f"k{i}": {"type": "string", "maxLength": 2000} for i in range(100)}}),
        schema({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}),
        Constraint(Grammar(GrammarKind.JSON_OBJECT), "response_format"),
    ],
)
async def test_sound_grammars_pass(check: GrammarCheck, constraint: Constraint) -> None:
    assert await verdict(check, constraint) == ""


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (regex("("), "regex: Regex parsing error at position 2"),
        (regex("(?=a)b"), "regex: Regex parsing error"),
        (ebnf("root ::= x"), 'ebnf: EBNF parser error at line 1, column 10: Rule "x" is not defined'),
        (ebnf("root ::= root"), "allows no token"),
        (ebnf('root ::= "a" x\nx ::= x'), "allows no token"),
        (schema({"type": "nonsense"}), 'response_format: Unsupported type "nonsense"'),
        (schema({"$ref": "#/$defs/missing"}), "Cannot find"),
        (ebnf('root ::= root root | "a" | ""'), "too ambiguous"),
    ],
)
async def test_invalid_grammars_are_refused_with_the_reason(check: GrammarCheck, constraint: Constraint, reason: str) -> None:
    assert reason in await verdict(check, constraint)


async def test_the_faulty_part_of_several_is_named(check: GrammarCheck) -> None:
    tag = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "x"}})
    parts = (Part("tools[0]", '{"type": "null"}'), Part("tools[1]", '{"type": "nonsense"}'))
    message = await verdict(check, Constraint(Grammar(GrammarKind.STRUCTURAL_TAG, tag), "tools", parts))
    assert message.startswith('tools[1]: Unsupported type "nonsense"')


async def test_an_explosive_grammar_is_refused_in_time_while_others_pass(check: GrammarCheck) -> None:
    started = time.monotonic()
    explosive = asyncio.create_task(verdict(check, ebnf(EXPLOSIVE)))
    await asyncio.sleep(0.2)
    assert await verdict(check, regex("quick+")) == ""
    assert not explosive.done()
    message = await explosive
    assert "takes more than 5 s" in message or "too ambiguous" in message or "1 GiB" in message
    assert time.monotonic() - started < 15
    assert worker_of(check).children() == []


async def test_memory_of_a_child_is_limited() -> None:
    pid = os.fork()
    if pid == 0:
        limit_resources()
        try:
            bytearray(MEMORY_LIMIT_BYTES // 2)
            bytearray(2 * MEMORY_LIMIT_BYTES)
        except MemoryError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


async def test_a_verdict_is_remembered(check: GrammarCheck) -> None:
    constraint = ebnf('root ::= root root | "b" | ""')
    first = await verdict(check, constraint)
    started = time.monotonic()
    assert await verdict(check, constraint) == first != ""
    assert time.monotonic() - started < 0.05


async def test_a_flood_of_slow_grammars_is_turned_away(check: GrammarCheck) -> None:
    tasks = [asyncio.create_task(check.check(regex(f"flood{i}"), VOCAB, EOS)) for i in range(MAX_RUNNING + MAX_WAITING + 5)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [error for error in results if error is not None]
    assert len(refused) == 5
    assert all(isinstance(error, ApiError) and (error.status, error.retry_after_s) == (429, 2) for error in refused)


async def test_a_killed_worker_fails_the_waiting_and_is_started_again(check: GrammarCheck) -> None:
    waiting = asyncio.create_task(check.check(ebnf(EXPLOSIVE + "\n"), VOCAB, EOS))
    await asyncio.sleep(0.5)
    killed = worker_of(check)
    children = killed.children()
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(Unavailable):
        await waiting
    assert await verdict(check, regex("again")) == ""
    assert worker_of(check).pid != killed.pid
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
