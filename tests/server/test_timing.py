"""The server's own account of a request's times, on request only."""

from __future__ import annotations

from tests.server.harness import FakeServer
from tests.server.test_chat import CHAT, events, post


def closing_chunk(fake: FakeServer, headers: dict[str, str]) -> dict[str, object]:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(fake, body, headers=headers).text)
    assert all("deepinfer" not in chunk for chunk in chunks[:-2])
    closing: dict[str, object] = chunks[-2]
    return closing


def test_the_last_chunk_says_where_the_time_went_when_asked(fake: FakeServer) -> None:
    account = closing_chunk(fake, {"x-deepinfer-timing": "1"})["deepinfer"]
    assert isinstance(account, dict)
    assert {"rank", "queue_s", "restore_s", "prefill_s", "first_output_s", "drafted_tokens", "accepted_tokens"} == set(account)
    assert account["first_output_s"] >= account["queue_s"] + account["restore_s"] + account["prefill_s"] >= 0


def test_without_the_header_the_stream_is_the_common_one(fake: FakeServer) -> None:
    assert "deepinfer" not in closing_chunk(fake, {})
