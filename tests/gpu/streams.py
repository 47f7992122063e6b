"""Requests as a client sends them over HTTP: streamed, many at once, each with what became of it."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine.tokenizer import Tokenizer

Messages = list[dict[str, str]]
PATIENCE_S = 120.0


@dataclass(slots=True)
class Asked:
    """One streamed chat request. Times by the monotonic clock; `first_s` is the first piece of text, 0 before it came.

    kind: open, whole, error (the server said so), or what went wrong.
    """

    began_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    kind: str = "open"
    text: str = ""
    rank: str = "?"
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.began_s) * 1e3

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or 0)

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def texts(model: Path, seed: int) -> Callable[[int], str]:
    """Makes texts of so many tokens by the tokenizer of a model directory; no two begin alike."""
    tokenizer, draw = Tokenizer.from_dir(model), random.Random(seed)
    added = set(tokenizer.added.values())
    words = [text for i in range(tokenizer.vocab_size) if i not in added and (text := tokenizer.decode([i])).strip().isalpha()]

    def make(tokens: int) -> str:
        text = "".join(draw.choice(words) for _ in range(tokens))
        return tokenizer.decode(tokenizer.encode_plain(text)[:tokens])

    return make


def ask(url: str, messages: Messages, max_tokens: int, asked: Asked | None = None) -> Asked:
    """Send one request and read its answer to the end. asked: filled in meanwhile, for those who look from outside."""
    asked = Asked() if asked is None else asked
    body = {
        "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0, "stream": True,
        "stream_options": {"include_usage": True}, "thinking": {"type": "disabled"},
    }  # fmt: skip
    asked.began_s = time.monotonic()
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
            asked.rank = answer.headers.get("x-deepinfer-rank", "?")
            asked.kind = _read(answer, asked)
    except httpx.HTTPError as error:
        asked.kind = f"broken: {error!r}"
    asked.ended_s = time.monotonic()
    return asked


def _read(answer: httpx.Response, asked: Asked) -> str:
    """How the answer ended."""
    if answer.status_code != 200:
        answer.read()
        return "error" if answer.status_code >= 500 else f"status {answer.status_code}: {answer.text[:120]}"
    ending = "cut"
    for line in answer.iter_lines():
        if line == "event: error":
            ending = "error"
        elif line == "data: [DONE]":
            ending = "whole" if ending == "cut" else "both an error and an end"
        elif line.startswith("data: {"):
            piece = json.loads(line.removeprefix("data: "))
            asked.usage = piece.get("usage") or asked.usage
            for choice in piece.get("choices", ()):
                text = choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
                asked.text += choice["delta"].get("content") or ""
                if text and not asked.first_s:
                    asked.first_s = time.monotonic()
    return ending


def ask_together(url: str, prompts: list[Messages], max_tokens: int) -> list[Asked]:
    """All at once; returns when all have ended."""
    begun = begin(url, prompts, max_tokens)
    for _, thread in begun:
        thread.join()
    return [asked for asked, _ in begun]


def begin(url: str, prompts: list[Messages], max_tokens: int) -> list[tuple[Asked, threading.Thread]]:
    """Send all at once and return while they run. Each ends, by `PATIENCE_S` at the latest without a byte."""
    begun = []
    for messages in prompts:
        asked = Asked()
        thread = threading.Thread(target=ask, args=(url, messages, max_tokens, asked), daemon=True)
        thread.start()
        begun.append((asked, thread))
    return begun
