"""One running server around the scripted engine per test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
