"""Many clients at once: no stream is lost, the loop stays free, the queue stays bounded, and nothing is left behind."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.config import EngineConfig
from engine.models.tiny import ensure_tiny
from hicache.config import HiCacheConfig
from server import launcher
from server.config import ServerConfig
from server.pacing import Pacer
from server.plan import ServerPlan
from tests.server.harness import NAME, FakeServer, eventually, finish, group_pids, start_fake

STREAMS = 500
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "stream": True, "thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def crowd() -> Iterator[FakeServer]:
    server = start_fake(max_queue=STREAMS)
    yield server
    finish(server)


def lag_buckets(server: FakeServer) -> dict[float, float]:
    """Upper bound in seconds -> probes of the event loop at most that late, since the start."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    pairs = re.findall(r'deepinfer:event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
    return {float(bound): float(count) for bound, count in pairs}


def resident_mib(server: FakeServer) -> float:
    return sum(psutil.Process(pid).memory_info().rss for pid in group_pids(server.current())) / 2**20


async def stream(port: int, body: bytes) -> tuple[int, bool]:
    """(status, whether [DONE] came) of one stream, read to its end over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    data = await reader.read()
    writer.close()
    return int(data[9:12]), b"data: [DONE]" in data


async def many(server: FakeServer, count: int) -> Counter[tuple[int, bool]]:
    body = httpx.Request("POST", "http://x", json=BODY).content
    return Counter(await asyncio.gather(*(stream(server.state.port, body) for _ in range(count))))


def settled(server: FakeServer) -> None:
    def idle() -> bool:
        requests, ranks = server.metrics()["requests"], server.metrics()["ranks"]
        return requests["active"] + requests["queued"] + requests["streams_open"] == 0 and not any(rank["running"] for rank in ranks)

    eventually(idle, 10)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_five_hundred_streams_on_the_embedded_model_lose_none(tmp_path: Path) -> None:
    base = Path(tempfile.mkdtemp(prefix="dxt-", dir="/tmp"))
    try:
        engine = EngineConfig(model=str(ensure_tiny(tmp_path)), max_num_seqs=16, prefill_any_interval=2)
        server = ServerConfig(port=0, max_queue=STREAMS, ready_timeout_s=120)
        state = launcher.start(ServerPlan(engine, HiCacheConfig(size_gb=0), server, NAME, base, base / "run"), lambda _event: None)
        body = httpx.Request("POST", "http://x", json={**BODY, "max_tokens": 8, "ignore_eos": True}).content
        answers = Counter(await asyncio.gather(*(stream(state.port, body) for _ in range(STREAMS))))
        assert answers == {(200, True): STREAMS}
        requests = httpx.get(f"{state.base_url}/deepinfer/metrics").json()["requests"]
        assert (requests["active"], requests["queued"], requests["finished_total"]["length"]) == (0, 0, STREAMS)
    finally:
        launcher.stop(NAME, base, 1.0)
        shutil.rmtree(base, ignore_errors=True)


@pytest.mark.slow
async def test_five_hundred_streams_all_complete_with_a_free_loop_and_bounded_memory(crowd: FakeServer) -> None:
    crowd.script("word " * 30, delay_s=0.15)
    await many(crowd, 50)  # the first requests load code
    before, memory = lag_buckets(crowd), resident_mib(crowd)
    for _ in range(3):
        assert await many(crowd, STREAMS) == {(200, True): STREAMS}
    after = lag_buckets(crowd)
    settled(crowd)
    probes = after[float("inf")] - before[float("inf")]
    late = probes - (after[0.05] - before[0.05])
    print(f"{probes:.0f} probes, {late:.0f} later than 50 ms; memory {memory:.0f} -> {resident_mib(crowd):.0f} MiB")
    assert probes > 100
    assert late / probes <= 0.01
    assert resident_mib(crowd) - memory < 100


@pytest.mark.slow
async def test_more_than_the_queue_holds_is_refused_at_once_with_retry_after(crowd: FakeServer) -> None:
    crowd.script("long", prefill_s=5.0)
    room = 8 + STREAMS  # sequences that the scripted engine runs, and the queue
    answers = await many(crowd, room + 40)
    assert answers == {(200, True): room, (429, False): 40}
    settled(crowd)
    assert crowd.metrics()["requests"]["rejected_total"]["429"] == 40


async def test_turns_pass_in_order_a_few_per_iteration() -> None:
    pacer, passed, iterations = Pacer(per_iteration=2), [], 0

    async def one(number: int) -> None:
        await pacer.wait()
        passed.append((iterations, number))

    tasks = [asyncio.create_task(one(number)) for number in range(7)]
    tasks[3].cancel()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        iterations += 1
    assert [number for _, number in passed] == [0, 1, 2, 4, 5, 6]
    assert max(Counter(at for at, _ in passed).values()) == 2
