"""What a client sees on two ranks of the embedded model."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import Dix, Server, start, wait_until
from tests.e2e.terminal import Terminal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
PAGE, KEEP = 128, 140
README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def text_of(num_words: int, topic: str) -> str:
    return " ".join(f"{topic} {i} is kept in box {i * 7 % 101}." for i in range(num_words // 8))


def test_streamed_chat_gives_the_message_of_the_whole_answer_and_the_same_usage(client: openai.OpenAI) -> None:
    ask = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say something about rivers."}],
        "temperature": 0,
        "max_tokens": 24,
        "extra_body": {"thinking": {"type": "disabled"}},
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


@pytest.mark.parametrize(
    ("question", "answer"), [("What is the capital of France?", "The capital of France is Paris."), ("What is 23 + 45?", "23 + 45 = 68.")]
)
def test_the_answers_that_the_readme_shows(client: openai.OpenAI, question: str, answer: str) -> None:
    done = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=64)
    assert done.choices[0].message.content == answer
    assert answer in README.read_text(encoding="utf-8")


def readme_talk() -> list[tuple[str, str]]:
    """(typed, answered) of the talk that the README shows."""
    talk = README.read_text(encoding="utf-8").split("--think off\n", 1)[1].split("\n\n", 1)[0].splitlines()
    found = [(line.removeprefix("> "), talk[number + 1]) for number, line in enumerate(talk) if line.startswith("> ")]
    assert len(found) >= 3, talk
    return found


def test_the_talk_in_the_readme_is_repeated_at_a_terminal(server: Server) -> None:
    command = [
        sys.executable,
        "-m",
        "deepinfer_cli",
        "chat",
        "--port",
        str(server.port),
        "--temperature",
        "0",
        "--think",
        "off",
        "--no-color",
    ]
    with Terminal(command, {**os.environ, "DIX_HOME": str(server.dix.home), "TERM": "dumb"}) as terminal:
        for asked, answer in readme_talk():
            terminal.read_until("> ")
            terminal.type(asked)
            seen = terminal.read_until("prefix cache")
            assert seen.splitlines()[1] == answer, seen


def test_later_turns_report_the_cached_tokens_that_the_rule_predicts(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": text_of(500, "parcel")}]
    states: set[int] = set()
    for turn in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            temperature=0,
            max_tokens=16,
            extra_body={"thinking": {"type": "disabled"}, "session_id": "predicted"},
        )
        prompt = answer.usage.prompt_tokens
        cap = (prompt - KEEP) // PAGE * PAGE
        predicted = max((s for s in states if s <= cap), default=0)
        assert answer.usage.prompt_tokens_details.cached_tokens == predicted, f"turn {turn + 1} of {prompt} tokens"
        assert turn == 0 or predicted > 0
        states |= {cap, (prompt - 1) // PAGE * PAGE}
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": text_of(200, f"letter {turn}")},
        ]


def test_bypassing_the_cache_reports_zero_and_gives_the_same_tokens(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": text_of(600, "crate")}], "temperature": 0, "max_tokens": 16}
    hint = {"session_id": "bypass", "thinking": {"type": "disabled"}}
    client.chat.completions.create(**ask, extra_body=hint)
    hit = client.chat.completions.create(**ask, extra_body=hint)
    cold = client.chat.completions.create(**ask, extra_body={**hint, "prefix_cache": False})
    assert hit.usage.prompt_tokens_details.cached_tokens > 0
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert hit.choices[0].message.content == cold.choices[0].message.content


def test_completions_models_and_health_answer(client: openai.OpenAI, server: Server) -> None:
    done = client.completions.create(model="tiny", prompt="One two three", max_tokens=4, temperature=0)
    assert done.usage.completion_tokens == 4
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert httpx.get(f"{server.url}/health").json()["ranks"] == {"ready": 2, "total": 2}
    assert "vllm:prompt_tokens_total" in httpx.get(f"{server.url}/metrics").text


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b'{"messages": []}', 400, None),
        (b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404, "model_not_found"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 9}', 400, "invalid_value"),
    ],
)
def test_bad_requests_get_the_error_shape_and_the_server_lives(server: Server, body: bytes, status: int, code: str | None) -> None:
    reply = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_prompt_beyond_the_limit_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"32,?768") as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x1 " * 40_000}])
    assert refused.value.code == "context_length_exceeded"


def test_every_prompt_token_is_accounted_for_on_exactly_one_rank(client: openai.OpenAI, server: Server) -> None:
    time.sleep(1.5)  # the counters of the test before this one
    before = server.metrics()["totals"]["tokens"]
    used = [
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text_of(400, "invoice")}], max_tokens=4, extra_body={"session_id": "sum"}
        ).usage
        for _ in range(3)
    ]
    total = before["prompt_total"] + sum(u.prompt_tokens for u in used)
    # Ranks report their counters about once a second.
    wait_until("the counters have settled", lambda: server.metrics()["totals"]["tokens"]["prompt_total"] >= total, 5.0)
    after = server.metrics()["totals"]["tokens"]
    assert after["prompt_total"] == total
    assert after["cached_total"] - before["cached_total"] == sum(u.prompt_tokens_details.cached_tokens for u in used)


def test_routing_by_cost_asks_the_caches_of_the_ranks(dix: Dix) -> None:
    server = start(dix, "cost", "--dp", "2", "--routing", "cost", "--rank-header")
    try:
        wait_until("the front reads both caches", lambda: server.metrics()["routing"]["asked_ranks"] == 2, 10)
        prompt = list(range(20, 820))
        places = []
        for turn in range(3):
            body = {"prompt": [*prompt, 30 + turn], "max_tokens": 2, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            places.append((answer.headers["X-DeepInfer-Rank"], cached))
        assert places[0][1] == 0
        assert places[1:] == [(places[0][0], 640)] * 2
        routing = server.metrics()["routing"]
        assert (routing["content_total"] + routing["prefix_total"], routing["in_flight"]) == (2, 0)
        httpx.post(f"{server.url}/reset_prefix_cache", timeout=30).raise_for_status()
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}, timeout=60)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    finally:
        dix("stop", "cost", "--grace", "1s")


def test_ranks_that_prefill_together_answer_as_one_rank_does(dix: Dix, server: Server) -> None:
    together = start(dix, "cp", "--dp", "2", "--cp", "2")
    try:
        prompts = [[20 + (i * 7 + n) % 900 for i in range(length)] for n, length in enumerate((5, 130, 700, 1500))]

        def ask(url: str, prompt: list[int], cache: bool) -> tuple[str, int]:
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "prefix_cache": cache}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
            return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        for prompt in prompts:
            alone, _ = ask(server.url, prompt, cache=False)
            assert ask(together.url, prompt, cache=False) == (alone, 0)
            assert ask(together.url, prompt, cache=True) == (alone, 0)
            hit = (len(prompt) - KEEP) // PAGE * PAGE if len(prompt) >= PAGE + KEEP else 0
            assert ask(together.url, prompt, cache=True) == (alone, hit)
    finally:
        dix("stop", "cp", "--grace", "1s")
