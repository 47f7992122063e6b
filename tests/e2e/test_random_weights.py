"""A server without weights: random ones write bytes, control tokens and halves of calls in any order, and nothing may break of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.models.released import excerpt
from tests.e2e.conftest import Dix, Server
from tests.gpu.whole_model import small

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
VOCABULARY = 4_608  # more than the tokenizer has
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}},
}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
CHAT = {"thinking": {"type": "disabled"}}
# What is asked for -> fields of the body.
KINDS: dict[str, dict[str, Any]] = {
    "reasoning": {},
    "text": CHAT,
    "stop strings": {**CHAT, "stop": ["e", " the", "\n"]},
    "tools": {"tools": [TOOL]},
    "tools without reasoning": {**CHAT, "tools": [TOOL]},
    "a forced call": {**CHAT, "tools": [TOOL], "tool_choice": "required"},
    "a schema": {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "several, hot": {"n": 3, "temperature": 2.0},
    "few ids": {"top_k": 3, "top_p": 0.5},
}


@pytest.fixture(scope="module")
def server(dix: Dix, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Drafts on, no weights; the tokenizer and the chat format are stand-ins."""
    model: Path = tmp_path_factory.mktemp("shapes") / "model"
    model.mkdir()
    config = small(excerpt((1, 2, 20, 21), stages=1, engram_rows=997))
    config["text_config"] |= {"vocab_size": VOCABULARY}
    (model / "config.json").write_text(json.dumps(config))
    refused = dix("start", str(model), "--name", "random", "--port", "0", "--set", "engine.load_format=dummy")
    assert refused.returncode == 2
    assert "dix model shapes" in refused.stderr
    dix.ok("model", "shapes", str(model))
    # Eager: a compiled step of these sizes would be built for this test alone.
    dix.ok("start", str(model), "--name", "random", "--port", "0", "--set", "engine.load_format=dummy", "--enforce-eager")
    yield Server(dix, "random", f"http://127.0.0.1:{dix.state('random')['port']}")
    dix("stop", "random", "--grace", "1s")


def ask(server: Server, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 120, "seed": 5, **more}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text[:300]
    return answer.json()


@pytest.mark.parametrize("kind", list(KINDS))
def test_answers_of_random_weights_are_whole(server: Server, kind: str) -> None:
    answer = ask(server, **KINDS[kind])
    for choice in answer["choices"]:
        assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    assert 0 < answer["usage"]["completion_tokens"] <= 120 * len(answer["choices"])
    if kind == "a schema" and answer["choices"][0]["finish_reason"] == "stop":
        assert json.loads(answer["choices"][0]["message"]["content"])["n"] in (1, 2)


def test_long_answers_that_ignore_their_end_are_as_long_as_asked_for(server: Server) -> None:
    assert ask(server, ignore_eos=True, tools=[TOOL], max_tokens=700)["usage"]["completion_tokens"] == 700


def test_prompts_may_hold_ids_of_the_vocabulary_that_the_tokenizer_lacks(server: Server) -> None:
    body = {"prompt": [VOCABULARY - 1, VOCABULARY - 2], "max_tokens": 60, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": 2, "completion_tokens": 60}
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [VOCABULARY]}, timeout=60).status_code == 400


def test_nothing_failed_meanwhile(server: Server) -> None:
    metrics = server.metrics()
    assert metrics["requests"]["finished_total"]["error"] == 0
    assert [rank["generation"] for rank in metrics["ranks"]] == [1]
