"""The embedded model over HTTP on a GPU, as a user starts it: `python -m tests.gpu.http_serve OUT [--device cpu]`. About 60 s.

`dix start`, streams side by side, a second turn whose usage reports tokens from the host cache, its answer with and without it, and a
stop that leaves no process. Needs what a server needs (fastapi, uvicorn, pyzmq, msgspec, ...), unlike the other scripts here.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import Dix, Server, alive, start, wait_until

STREAMS, TOKENS = 8, 48
FACTS = " ".join(f"Box {i} holds {i * 7 % 101} keys." for i in range(120))


def ask(server: Server, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": TOKENS, "thinking": {"type": "disabled"}, **more}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def stream(server: Server, number: int) -> tuple[str, float, float]:
    """Text, seconds until its first piece, and seconds until its end."""
    body = {
        "model": "tiny", "stream": True, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": f"Name {number + 3} rivers and say where they are."}],
    }  # fmt: skip
    text, first, began = "", 0.0, time.perf_counter()
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text += choice["delta"].get("content") or ""
                first = first or time.perf_counter() - began
    return text, first, time.perf_counter() - began


def streams(server: Server) -> dict[str, Any]:
    """Several at once, twice: the second time nothing is compiled any more."""
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(lambda number: stream(server, number), range(STREAMS)))
        found = list(pool.map(lambda number: stream(server, number), range(STREAMS)))
    alone = stream(server, 0)
    assert all(text for text, _, _ in found), "a stream brought no text"
    assert alone[0] == stream(server, 0)[0], "the same request, alone and greedy, gave two texts"
    return {
        "streams": STREAMS,
        "first_ms": round(1e3 * sorted(first for _, first, _ in found)[STREAMS // 2], 1),
        "alone_first_ms": round(1e3 * alone[1], 1),
        "alone_per_token_ms": round(1e3 * (alone[2] - alone[1]) / (TOKENS - 1), 2),
    }


def cache_hit(server: Server) -> dict[str, Any]:
    """A second turn finds the first one in the host cache; without the cache it has the same answer."""
    first = [{"role": "user", "content": f"{FACTS} How many keys does box 5 hold?"}]
    said = ask(server, first)["choices"][0]["message"]["content"]
    second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "And box 6?"}]
    hit = ask(server, second)
    cold = ask(server, second, prefix_cache=False)
    cached = hit["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 512, f"{cached} tokens of {hit['usage']['prompt_tokens']} came from the cache"
    bypassed = cold["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert not bypassed, f"{bypassed} tokens came from the cache although the request forbade it"
    answers = [one["choices"][0]["message"]["content"] for one in (hit, cold)]
    return {"prompt": hit["usage"]["prompt_tokens"], "cached": cached, "same_answer": answers[0] == answers[1]}


def main() -> int:
    out, device = Path(sys.argv[1]), "cpu" if "--device" in sys.argv and "cpu" in sys.argv else "cuda"
    out.mkdir(parents=True, exist_ok=True)
    dix = Dix(out / "home")
    began = time.monotonic()
    server = start(dix, "gpu", "--device", device)
    processes = dix.processes("gpu")
    result: dict[str, Any] = {"ready_s": round(time.monotonic() - began, 1)}
    try:
        result |= streams(server) | cache_hit(server)
    finally:
        began = time.monotonic()
        stopped = dix("stop", "gpu", timeout_s=60)
        print(stopped.stdout[-500:], stopped.stderr[-500:])
    assert stopped.returncode == 0, f"dix stop exited {stopped.returncode}"
    wait_until("every process has ended", lambda: not alive(processes), 30)
    result |= {"stopped_s": round(time.monotonic() - began, 1), "processes": len(processes)}
    print(json.dumps(result))
    (out / "http_serve.json").write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
