"""Counters, health, disconnects and limits of the running front."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.harness import FakeServer, eventually, finish, start_fake
from tests.server.test_crowd import lag_buckets

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "count me"}], "thinking": {"type": "disabled"}}
ENDLESS: dict[str, Any] = {**BODY, "ignore_eos": True, "max_tokens": 4000}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def settled(server: FakeServer) -> dict[str, Any]:
    """Metrics once nothing runs and the ranks have reported it."""

    def quiet() -> dict[str, Any] | None:
        document = server.metrics()
        busy = document["requests"]["active"] + document["requests"]["queued"] + sum(r["running"] + r["waiting"] for r in document["ranks"])
        return document if busy == 0 else None

    asked = eventually(quiet)["time"]
    return reported_after(server, asked)


def reported_after(server: FakeServer, asked: float) -> dict[str, Any]:
    """Metrics whose every rank reported later than `asked`, by the front's clock."""

    def fresh() -> dict[str, Any] | None:
        document = server.metrics()
        return document if all(rank["report_time"] > asked for rank in document["ranks"]) else None

    result: dict[str, Any] = eventually(fresh)
    return result


def check_invariants(document: dict[str, Any]) -> None:
    requests = document["requests"]
    assert requests["admitted_total"] == sum(requests["finished_total"].values()) + requests["active"] + requests["queued"]
    for record in (*document["ranks"], document["totals"]):
        cache = record["prefix_cache"]
        assert cache["hit_tokens_total"] <= cache["lookup_tokens_total"]
        assert sum(tier["hit_tokens_total"] for tier in cache["tiers"].values()) == cache["hit_tokens_total"]
    strings = {".boot_id", ".model", ".state", *(f".ranks[{i}].state" for i in range(len(document["ranks"])))}
    for path, value in leaves(document):
        assert isinstance(value, str if path in strings else (int, float)), (path, value)


def test_report_that_came_after_an_answer_counts_it_also_when_nothing_happens_any_more(fake: FakeServer) -> None:
    counted = settled(fake)["totals"]["tokens"]["prompt_total"]
    for _ in range(3):
        counted += httpx.post(f"{fake.url}/v1/chat/completions", json=BODY, timeout=20).json()["usage"]["prompt_tokens"]
        assert reported_after(fake, fake.metrics()["time"])["totals"]["tokens"]["prompt_total"] == counted
    idle = fake.metrics()["ranks"]
    assert min(rank["report_time"] for rank in idle) < reported_after(fake, fake.metrics()["time"])["ranks"][0]["report_time"]


def test_counters_agree_with_what_clients_were_told(fake: FakeServer) -> None:
    before = settled(fake)
    told = {"prompt": 0, "cached": 0, "completion": 0}
    for body in (BODY, BODY, {**BODY, "prefix_cache": False}, {**BODY, "max_tokens": 1}, {**BODY, "temperature": 5}):
        answer = httpx.post(f"{fake.url}/v1/chat/completions", json=body).json()
        if usage := answer.get("usage"):
            told["prompt"] += usage["prompt_tokens"]
            told["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
            told["completion"] += usage["completion_tokens"]
    after = settled(fake)
    check_invariants(after)

    def grown(*path: str) -> int:
        old, new = before, after
        for name in path:
            old, new = old[name], new[name]
        return int(new) - int(old)  # type: ignore[call-overload]

    assert grown("totals", "tokens", "cached_total") == told["cached"] > 0
    assert grown("totals", "tokens", "prompt_total") == told["prompt"]
    assert grown("totals", "tokens", "generated_total") == told["completion"]
    assert grown("requests", "received_total") == 5
    assert grown("requests", "admitted_total") == 4
    assert grown("requests", "finished_total", "stop") == 3
    assert grown("requests", "finished_total", "length") == 1
    assert grown("requests", "rejected_total", "400") == 1
    assert grown("first_tokens", "requests_total") == 4
    assert after["first_tokens"]["ttft_seconds_total"] > before["first_tokens"]["ttft_seconds_total"]


def test_choices_of_one_prompt_tell_what_the_first_reused_while_ranks_count_each(fake: FakeServer) -> None:
    before = settled(fake)["totals"]["tokens"]
    body = {**BODY, "messages": [{"role": "user", "content": "three choices of one prompt"}], "n": 3}
    usage = httpx.post(f"{fake.url}/v1/chat/completions", json=body).json()["usage"]
    after = settled(fake)["totals"]["tokens"]
    prompt = usage["prompt_tokens"]
    assert (usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_cache_miss_tokens"]) == (0, prompt)
    assert after["prompt_total"] - before["prompt_total"] == 3 * prompt
    assert after["cached_total"] - before["cached_total"] == 2 * (prompt - 1)
    assert after["generated_total"] - before["generated_total"] == usage["completion_tokens"]


def test_prometheus_speaks_both_dialects_and_matches_the_json(fake: FakeServer) -> None:
    httpx.post(f"{fake.url}/v1/chat/completions", json=BODY)
    totals = settled(fake)["totals"]
    text = httpx.get(f"{fake.url}/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}
    labels = '{engine="0",model_name="fake"}'
    for namespace in ("vllm", "deepinfer"):
        assert values[f"{namespace}:prompt_tokens_total{labels}"] == totals["tokens"]["prompt_total"]
        assert values[f"{namespace}:generation_tokens_total{labels}"] == totals["tokens"]["generated_total"]
        assert values[f"{namespace}:num_requests_running{labels}"] == 0
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
            assert values[f"{namespace}:{name}_count{labels}"] > 0
    assert values[f"vllm:external_prefix_cache_hits_total{labels}"] == totals["prefix_cache"]["tiers"]["host"]["hit_tokens_total"]
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake"}' in values
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared)), "a name is declared once"


def test_oddities_of_requests_and_outputs_are_counted(fake: FakeServer) -> None:
    def values() -> dict[str, float]:
        lines = [line for line in httpx.get(f"{fake.url}/metrics").text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = values()
    fake.script('\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="undeclared">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>')
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    body = {"messages": history, "tools": [{"type": "function", "function": {"name": "f"}}], "made_up": 1}
    httpx.post(f"{fake.url}/v1/chat/completions", json=body)
    after = values()
    for name in ("history_missing_reasoning", "undeclared_calls", "unknown_fields"):
        assert after[f"deepinfer:{name}_total"] == before[f"deepinfer:{name}_total"] + 1, name


def start_and_drop(server: FakeServer, body: dict[str, Any], wait_for: str) -> None:
    """Open a request, wait until it is queued or active, close the connection."""
    with httpx.Client(timeout=0.2) as client:
        try:
            if body.get("stream"):
                with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
                    lines = response.iter_lines()  # dropping the iterator would close the response
                    next(lines)
                    eventually(lambda: server.metrics()["requests"][wait_for] == 1)
            else:
                client.post(f"{server.url}/v1/chat/completions", json=body)
        except httpx.TimeoutException:
            return


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("phase", ["active", "queued"])
def test_leaving_client_frees_its_sequence(fake: FakeServer, streamed: bool, phase: str) -> None:
    aborted = settled(fake)["requests"]["finished_total"]["abort"]
    fake.script("on and on ", delay_s=0.02, prefill_s=30.0 if phase == "queued" else 0.0)
    start_and_drop(fake, {**ENDLESS, "stream": streamed}, phase)
    began_s = time.monotonic()
    document = settled(fake)
    assert time.monotonic() - began_s < 4
    assert document["requests"]["finished_total"]["abort"] == aborted + 1
    assert document["requests"]["streams_open"] == 0
    check_invariants(document)


@pytest.mark.slow
def test_silent_stream_gets_comments_and_slow_prefill_is_not_a_failure(fake: FakeServer) -> None:
    fake.script("late", prefill_s=11.0)
    text = httpx.post(f"{fake.url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=30).text
    assert text.count(": keep-alive\n\n") == 1
    assert text.endswith("data: [DONE]\n\n")
    pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == "late"


@pytest.fixture(scope="module")
def tight() -> Iterator[FakeServer]:
    server = start_fake(max_queue=2, request_timeout_s=3.0)
    yield server
    finish(server)


def test_full_queue_is_a_429_with_retry_after(tight: FakeServer) -> None:
    tight.script("long ", prefill_s=2.5, delay_s=0.0)
    results: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: results.append(httpx.post(f"{tight.url}/v1/chat/completions", json=BODY, timeout=20)))
        for _ in range(13)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    statuses = sorted(response.status_code for response in results)
    assert statuses == [200] * 10 + [429] * 3, "8 running and 2 waiting fit"
    refused = next(response for response in results if response.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    assert settled(tight)["requests"]["rejected_total"]["429"] == 3


def test_request_deadline_is_504_before_and_an_error_event_after_the_first_byte(tight: FakeServer) -> None:
    tight.script("on and on ", delay_s=0.05)
    late = httpx.post(f"{tight.url}/v1/chat/completions", json=ENDLESS, timeout=20)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
    text = httpx.post(f"{tight.url}/v1/chat/completions", json={**ENDLESS, "stream": True}, timeout=20).text
    assert text.split("\n\n")[-2].startswith("event: error\ndata: ")
    assert "[DONE]" not in text
    settled(tight)


async def test_sixty_streams_at_once_all_complete_and_the_loop_stays_responsive(fake: FakeServer) -> None:
    fake.script("a b c d e f g h i j k l m n o p", delay_s=0.002)
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def one() -> int:
            while True:
                response = await client.post(f"{fake.url}/v1/chat/completions", json={**BODY, "stream": True})
                if response.status_code != 429:
                    return response.text.count("data: [DONE]")
                await asyncio.sleep(0.2)

        before = lag_buckets(fake)
        done = await asyncio.gather(*(one() for _ in range(60)))
    after = lag_buckets(fake)
    assert done == [1] * 60
    late = (after[float("inf")] - before[float("inf")]) - (after[0.5] - before[0.5])
    assert late <= 1, "the loop was blocked for more than half a second, more than once"
    check_invariants(settled(fake))


def test_health_answers_while_a_large_prompt_is_tokenised(fake: FakeServer) -> None:
    body = json.dumps({"prompt": "some words to split " * 200_000}).encode()
    results: list[int] = []
    headers = {"content-type": "application/json"}
    worker = threading.Thread(
        target=lambda: results.append(httpx.post(f"{fake.url}/tokenize", content=body, headers=headers, timeout=60).status_code)
    )
    worker.start()
    meanwhile = 0
    while worker.is_alive():
        assert httpx.get(f"{fake.url}/health", timeout=10).status_code == 200
        meanwhile += worker.is_alive()
    assert results == [200]
    assert meanwhile >= 3, "a loop that tokenises answers before and after it"
