"""Prompts of `server.warm`: computed and pinned before the server says that it is ready, or refused with the line that is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.errors import ConfigError, DixError
from server.warm_file import read_warm_file
from tests.server.harness import eventually, finish, start_fake

TALK: dict[str, Any] = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]}


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def test_file_holds_bodies_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "warm.jsonl", json.dumps(TALK), "", '{"prompt": "once"}')
    assert read_warm_file(path) == [TALK, {"prompt": "once"}]
    assert read_warm_file("") == []
    for line in ("{", "3", '{"prompt": 3}', '{"messages": "x"}', "[" * 100_000):
        with pytest.raises(ConfigError, match="line 2"):
            read_warm_file(write(tmp_path / "bad.jsonl", '{"prompt": "a"}', line))
    with pytest.raises(ConfigError, match="cannot read"):
        read_warm_file(str(tmp_path / "absent.jsonl"))


def test_prompts_are_computed_and_pinned_before_ready_and_again_after_a_restart(tmp_path: Path) -> None:
    server = start_fake(warm=write(tmp_path / "warm.jsonl", json.dumps(TALK), '{"prompt": "once"}'), hicache_size_gb=0.01)
    try:
        assert [event["event"] for event in server.events].count("ready") == 1
        bodies = ({"messages": TALK["messages"]}, {"prompt": "once"})
        ids = [httpx.post(f"{server.url}/tokenize", json=body, timeout=20).json()["tokens"] for body in bodies]
        assert [pin["ids"] for pin in server.kept()] == ids
        assert all(pin["ttl_s"] == math.inf for pin in server.kept())
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=TALK, timeout=20).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        httpx.post(f"{server.url}/deepinfer/debug/fault", json={"kind": "exit"}, timeout=20)
        eventually(lambda: len(server.kept()) == 4, timeout_s=60)
        eventually(lambda: httpx.get(f"{server.url}/health/ready", timeout=5).status_code == 200, timeout_s=60)
    finally:
        finish(server)


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ('{"messages": [{"role": "nobody"}]}', {}, "prompt 1 of server.warm"),
        ("nothing", {}, "line 1 of server.warm"),
        (json.dumps(TALK), {"hicache_size_gb": 0}, "needs the host prefix cache"),
        (json.dumps(TALK), {"isolation": "api_key"}, "no API key"),
    ],
)
def test_what_cannot_be_warmed_ends_the_start_with_a_reason(tmp_path: Path, line: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DixError, match=words) as refused:
        start_fake(**{"warm": write(tmp_path / "warm.jsonl", line), "hicache_size_gb": 0.01, **options})
    assert refused.value.exit_code == 2
