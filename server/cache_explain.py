"""Explains to people what a request finds in the prefix cache: the rank's record, with texts and the place where prompts differ."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from server.errors import Unauthorized
from server.protocol import Reply
from server.text import Text
from server.tools import Tools

HEADER = "x-deepinfer-cache-explain"
PATIENCE_S = 10.0


def wants_explanation(http: HttpRequest) -> bool:
    """Whether the request asks for one, by header.

    Raises:
        ApiError: 401, it shows prompt text, which without API keys only loop-back peers may see.
    """
    if http.headers.get(HEADER) != "1":
        return False
    if not http.state.trusted:
        raise Unauthorized(f"{HEADER} is only answered to loop-back peers while no API key is configured")
    return True


async def explanation(future: asyncio.Future[Reply] | None, text: Text, ids: Sequence[int], tools: Tools | None) -> dict[str, Any] | None:
    """The value of `cache_explain`; None when none was asked for. The rank answers before it begins with the request."""
    if future is None:
        return None
    try:
        async with asyncio.timeout(PATIENCE_S):
            reply = await future
    except TimeoutError:
        return {"error": "the rank did not answer in time"}
    return {"error": reply.error} if reply.error else described(reply.result, text, ids, tools)


def described(record: dict[str, Any], text: Text, ids: Sequence[int], tools: Tools | None) -> dict[str, Any]:
    """A rank's record of the prompt `ids`, with the texts of both sides of the first difference and the place it belongs to."""
    difference = record.get("first_difference")
    if not difference:
        return record
    decode = text.tokenizer.decode
    both = {"stored_text": decode(difference["stored"]), "asked_text": decode(difference["asked"])}
    both["kind"] = _kind(both["stored_text"], both["asked_text"])
    return {**record, "first_difference": {**difference, **both, "place": place(text, ids, difference["index"], tools)}}


def _kind(stored: str, asked: str) -> str:
    """Whether other text begins there, or the same text split into other tokens."""
    length = min(len(stored), len(asked))
    return "split" if stored[:length] == asked[:length] else "text"


def place(text: Text, ids: Sequence[int], at: int, tools: Tools | None) -> dict[str, Any]:
    """Turn of the prompt (1 is the first), the control token that opens it, and the tool declaration, if token `at` lies in one."""
    opened = [token_id for token_id in ids[: at + 1] if token_id in text.turn_ids]
    found: dict[str, Any] = {"turn": len(opened), "opened_by": text.tokenizer.decode(opened[-1:])}
    if len(opened) == 1 and tools is not None and tools.names:
        before = text.tokenizer.decode(ids[: at + 1])
        begins = {name: before.rfind(f'"name": "{name}"') for name in tools.names}
        nearest = max(begins, key=begins.__getitem__)
        if begins[nearest] >= 0:
            found["tool"] = nearest
    return found
