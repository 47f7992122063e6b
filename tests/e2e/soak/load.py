"""Requests of every kind, drawn at random, and how each of them ended."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.cache_live import Live

PATIENCE_S = 900.0  # a machine shared with others may be slow; what takes longer is lost
MOST_KEPT = 40
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}},
]
KINDS = ("chat", "stream", "seed", "tools", "grammar", "long", "talk", "choices", "again")
WEIGHTS = (20, 20, 10, 10, 10, 12, 15, 5, 12)


@dataclass(frozen=True, slots=True)
class Ended:
    """One request. outcome: whole, error (the server said why), left (we closed the connection), wrong or lost."""

    began_s: float
    seconds: float
    kind: str
    outcome: str
    detail: str = ""


class Left(Exception):
    """This side closed the connection."""


@dataclass(slots=True)
class Asked:
    """A body whose answer must be the same whenever it is asked again."""

    body: dict[str, Any]
    text: str | None = None


class Load:
    """Draws requests and sends them. Safe to use from several threads."""

    def __init__(self, live: Live, seed: int, began_s: float) -> None:
        self._live, self._draw, self._began_s = live, random.Random(seed), began_s
        self._lock = threading.Lock()
        self._kept: list[Asked] = []
        self._talks: list[list[dict[str, str]]] = []
        self._client = httpx.Client(base_url=live.url, timeout=PATIENCE_S, trust_env=False)

    def draw(self) -> tuple[str, Asked, float]:
        """(kind, request, seconds after which this side goes away; 0 for never)."""
        with self._lock:
            draw = self._draw
            kind = draw.choices(KINDS, WEIGHTS)[0]
            if kind == "again" and self._kept:
                return kind, draw.choice(self._kept), 0.0
            asked = Asked(self._body(kind, draw))
            leaves = draw.uniform(0.01, 2.5) if draw.random() < 0.25 else 0.0
            if not leaves and kind in ("chat", "stream", "seed", "long"):
                self._kept.append(asked)
                if len(self._kept) > MOST_KEPT:
                    self._kept.pop(draw.randrange(MOST_KEPT))
            return kind, asked, leaves

    def send(self, kind: str, asked: Asked, leaves: float) -> Ended:
        began = time.monotonic()

        def ended(outcome: str, detail: str = "") -> Ended:
            return Ended(round(began - self._began_s, 2), round(time.monotonic() - began, 3), kind, outcome, detail[:300])

        try:
            refused, text = _receive(self._client, asked.body, leaves)
        except Left:
            return ended("left")
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return ended("lost", repr(error))
        if refused:
            return ended("error", refused)
        with self._lock:
            expected, asked.text = asked.text, text if asked.text is None else asked.text
            if kind == "talk":
                self._go_on(asked.body["messages"], text)
        if kind in ("tools", "grammar") and not _keeps_to_the_schema(text):
            return ended("wrong", text)
        if expected is not None and expected != text:
            return ended("wrong", f"{expected!r} became {text!r}")
        return ended("whole", str(len(text)))

    def _body(self, kind: str, draw: random.Random) -> dict[str, Any]:
        body: dict[str, Any] = {"temperature": 0, "max_tokens": draw.choice((8, 24, 60, 120)), "thinking": {"type": "disabled"}}
        body |= {"messages": self._messages(draw, draw.choice((5, 40, 200))), "stream": draw.random() < 0.5}
        match kind:
            case "stream":
                body |= {"stream": True, "max_tokens": draw.choice((60, 200)), "ignore_eos": True}
            case "seed":
                body |= {"temperature": 1.0, "seed": draw.randrange(10**6)}
            case "tools":
                body |= {"tools": TOOLS, "tool_choice": "required", "max_tokens": 400, "messages": _question("What about Oslo?")}
            case "grammar":
                response = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
                body |= {"response_format": response, "max_tokens": 400, "messages": _question("What about Rome?")}
            case "long":
                body["messages"] = self._messages(draw, draw.choice((1500, 3000, 4200)))
            case "talk":
                body |= {"messages": self._turn(draw), "session_id": f"talk-{draw.randrange(6)}"}
            case "choices":
                body |= {"n": 3, "temperature": 1.0, "logprobs": True, "top_logprobs": 3}
        return body

    def _messages(self, draw: random.Random, size: int) -> list[dict[str, str]]:
        theme = 1000 * draw.randrange(4)
        system = {"role": "system", "content": self._live.text([theme + i for i in range(draw.choice((0, 400, 400)))])}
        return [system, {"role": "user", "content": self._live.text([draw.randrange(999) for _ in range(size)])}]

    def _turn(self, draw: random.Random) -> list[dict[str, str]]:
        """A conversation goes on, or a new one begins."""
        if self._talks and draw.random() < 0.8:
            talk = draw.choice(self._talks)
            return [*talk, {"role": "user", "content": self._live.text([draw.randrange(999) for _ in range(60)])}]
        return self._messages(draw, 300)

    def _go_on(self, messages: list[dict[str, str]], text: str) -> None:
        self._talks.append([*messages, {"role": "assistant", "content": text}])
        del self._talks[:-4]
        if sum(len(message["content"]) for message in self._talks[-1]) > 20_000:
            self._talks.pop()


def _question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _receive(client: httpx.Client, body: dict[str, Any], leaves: float) -> tuple[str, str]:
    """(why the server refused or failed, text of all choices).

    Raises:
        Left: `leaves` seconds were over.
        ValueError: an end that tells the client nothing.
    """
    until = time.monotonic() + leaves if leaves else None
    timeout = httpx.Timeout(PATIENCE_S, read=leaves or PATIENCE_S)
    try:
        with client.stream("POST", "/v1/chat/completions", json=body, timeout=timeout) as reply:
            lines = list(_lines(reply, until))
            status = reply.status_code
    except httpx.ReadTimeout:
        if leaves:
            raise Left from None
        raise
    if status != 200:
        message = json.loads("\n".join(lines))["error"]["message"]
        if (status < 500 and status != 429) or not message:
            raise ValueError(f"status {status}: {lines}")
        return f"{status} {message}", ""
    return _streamed(lines) if body["stream"] else ("", _texts(json.loads("\n".join(lines))["choices"], "message"))


def _lines(reply: httpx.Response, until: float | None) -> Iterator[str]:
    for line in reply.iter_lines():
        if until is not None and time.monotonic() > until:
            raise Left
        yield line


def _streamed(lines: list[str]) -> tuple[str, str]:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if "event: error" in lines:
        if "[DONE]" in data:
            raise ValueError("both an error and an end")
        return str(json.loads(data[-1])["error"]["message"]), ""
    if not data or data[-1] != "[DONE]":
        raise ValueError(f"the stream was cut: {lines[-2:]}")
    return "", _texts([choice for line in data[:-1] for choice in json.loads(line)["choices"]], "delta")


def _texts(choices: list[dict[str, Any]], part: str) -> str:
    """Content and calls' arguments of all choices, in the choices' order."""
    texts: dict[int, str] = {}
    for choice in choices:
        piece = choice[part].get("content") or ""
        piece += "".join(call["function"].get("arguments") or "" for call in choice[part].get("tool_calls") or [])
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return "\x1f".join(texts[index] for index in sorted(texts))


def _keeps_to_the_schema(text: str) -> bool:
    """Arguments of one or several calls, or one document; an answer that max_tokens cut is not judged."""
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except ValueError:
            return len(text) > 300
        if value != {} and (value.keys() != {"city", "days"} or value["city"] not in ("Oslo", "Rome") or value["days"] not in range(1, 10)):
            return False
        rest = rest[end:].strip()
    return True
