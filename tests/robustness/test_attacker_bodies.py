"""Hostile bodies: bombs of values, floods of large and of slow ones. Without a server; the limits are made small."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from server import json_body
from server.errors import ApiError, BadRequest
from server.json_body import BODIES_IN_MEMORY, INLINE_BYTES, MAX_VALUES, Bodies, decode, num_values
from server.workers import Workers

MIB = 2**20


def refused(data: bytes) -> str:
    with pytest.raises(BadRequest) as caught:
        decode(data)
    assert caught.value.code == "invalid_json"
    return caught.value.message


@pytest.mark.parametrize("item", [b"[]", b"{}", b'""', b'"ab"', b"300", b"1.5", b"null", b'{"a":[]}', b'"\\"[,"'])
def test_a_bomb_of_small_values_is_refused_before_it_is_built(item: bytes) -> None:
    data = b'{"a":[' + b",".join([item] * (MAX_VALUES + 1)) + b"]}"
    tracemalloc.start()
    try:
        assert f"more than {MAX_VALUES}" in refused(data)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(data) + 200 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", [",[{" * 10, '\\",[{', "\\\\", '",', "{}[],"])
def test_marks_inside_strings_are_no_values(text: str) -> None:
    content = text * (2 * MAX_VALUES // len(text))
    assert decode(json.dumps({"content": content}).encode()) == {"content": content}


JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(st.sampled_from('a\\",[]{}é\n'), max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.sampled_from('",\\['), max_size=3), inner, max_size=4),
    max_leaves=20,
)


def structure(value: Any) -> int:
    """Commas and opening brackets outside strings."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(structure(item) for item in inner)


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_values_are_counted_exactly_whatever_strings_hold(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "MAX_VALUES", 0)
        patch.setattr(json_body, "_refuses_by_quotes", lambda _marks: False)
        assert num_values(json.dumps(value).encode()) == structure(value)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": 1, "a": NaN}', b'{"a": -Infinity}', b'{"a": 1e309}', b'{"a": ' + b"9" * 5000 + b"}", b'{"\\udfff": 1}', b'{"a": "\\ud83d"}',
        b'{"a": "\xed\xa0\x80"}', b'{"a": "\xc0\xaf"}', b'{"a":' * 65 + b"1" + b"}" * 65, b"[" * 200_000, b'{"a":' * 200_000,
        gzip.compress(b"{}", mtime=0), b'{"a": 1}' * 2, b"'a'", b'{"a": 01}', b'{"a": "\x00"}', b"\xff\xfe{\x00}\x00",
    ],
)  # fmt: skip
def test_json_that_is_not_strict_is_refused(data: bytes) -> None:
    refused(data)


def test_a_hundred_thousand_keys_and_doubled_keys_are_json() -> None:
    assert len(decode(json.dumps({str(i): i for i in range(10**5)}).encode())) == 10**5
    assert decode(b'{"a": 1, "a": 2}') == {"a": 2}


class Upload:
    """A request whose body comes in pieces when it is told to."""

    def __init__(self, *pieces: bytes) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for piece in pieces:
            self.send(piece)
        self.request = Request({"type": "http", "headers": [], "state": {}}, self.messages.get)

    def send(self, piece: bytes, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})


async def test_large_bodies_that_stall_cannot_fill_the_memory_nor_lock_out_small_ones() -> None:
    bodies = Bodies(MIB, Workers(1))
    uploads = [Upload(b" " * MIB) for _ in range(BODIES_IN_MEMORY)]
    stalled = [asyncio.create_task(bodies.read_object(upload.request)) for upload in uploads]
    await asyncio.sleep(0.01)
    assert bodies.num_bytes == BODIES_IN_MEMORY * MIB
    with pytest.raises(ApiError) as caught:
        await bodies.read_object(Upload(b" " * (INLINE_BYTES + 1)).request)
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 1)
    small = Upload()
    small.send(b'{"a": 1}', more=False)
    assert await bodies.read_object(small.request) == {"a": 1}
    for task in stalled:
        task.cancel()
    await asyncio.gather(*stalled, return_exceptions=True)
    assert bodies.num_bytes == 0


@pytest.mark.parametrize("end", [b"}", b"", None])
async def test_memory_for_a_body_comes_back_however_it_ends(end: bytes | None) -> None:
    bodies = Bodies(MIB, Workers(1))
    upload = Upload(b'{"a": "' + b"x" * INLINE_BYTES + b'"')
    if end is None:
        upload.messages.put_nowait({"type": "http.disconnect"})
    else:
        upload.send(end, more=False)
    answers = await asyncio.gather(bodies.read_object(upload.request), return_exceptions=True)
    assert isinstance(answers[0], dict if end else ApiError)
    assert bodies.num_bytes == 0


async def test_a_body_that_dribbles_in_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "IDLE_TIMEOUT_S", 0.2)
    upload = Upload()

    async def dribble() -> None:
        while True:
            upload.send(b" ")
            await asyncio.sleep(0.02)

    dribbling = asyncio.create_task(dribble())
    with pytest.raises(ApiError) as caught:
        await Bodies(MIB, Workers(1)).read_object(upload.request)
    assert (caught.value.status, caught.value.code) == (408, "body_timeout")
    dribbling.cancel()
