"""One running server around the scripted engine for all test modules, and a pool of ranks without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server import protocol
from server.config import ServerConfig
from server.heartbeat import HeartbeatFile
from server.rank_pool import RankPool
from server.router import Router
from tests.server.harness import FakeServer, finish, start_fake


@pytest.fixture(scope="session")
def session_fake() -> Iterator[FakeServer]:
    server = start_fake()
    yield server
    finish(server)


@pytest.fixture
def fake(session_fake: FakeServer) -> FakeServer:
    """The shared server with its default script and an empty record."""
    session_fake.script()
    session_fake.record_path.unlink(missing_ok=True)
    return session_fake


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RankPool]:
    """One rank that is ready and to which nobody listens."""
    found = RankPool(f"ipc://{tmp_path}/ranks", 1, ServerConfig(), Router("affinity"), HeartbeatFile(tmp_path / "beats", slots=2))
    limits = protocol.RankLimits(
        max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=512, vocab_size=512, eos_token_id=1, keep_tokens=384, num_blocks=64,
        block_size=128,
    )  # fmt: skip
    found._apply(found.ranks[0], protocol.Ready(1, limits))
    found.serving = True
    yield found
    found.shut()
