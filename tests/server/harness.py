"""A real server (supervisor, front, ranks) around the scripted engine, for tests over TCP."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine.config import EngineConfig
from engine.models import tiny
from engine.tokenizer import Tokenizer
from hicache.config import HiCacheConfig
from server import launcher
from server.config import ServerConfig
from server.plan import ServerPlan
from server.state import ServerState, read_state, server_dir
from tests.server.fake_engine import KEPT_FILE, SCRIPT_FILE

ROOT = Path(__file__).resolve().parents[2]
FACTORY = "tests.server.fake_engine:build"
NAME = "fake"


def write_model_dir(directory: Path) -> Path:
    """Everything of the embedded model except its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny.tiny_config()))
    (directory / "tokenizer_config.json").write_text(json.dumps(tiny.tokenizer_config()))
    shutil.copyfile(tiny.TOKENIZER_FILE, directory / "tokenizer.json")
    tiny.write_encoding(directory / "encoding")
    return directory


@dataclass
class FakeServer:
    """A running server and the handles that tests pull."""

    base: Path
    state: ServerState
    tokenizer: Tokenizer
    events: list[dict[str, Any]]

    @property
    def url(self) -> str:
        return self.state.base_url

    @property
    def directory(self) -> Path:
        return server_dir(self.base, NAME)

    @property
    def record_path(self) -> Path:
        return self.base / "record.jsonl"

    def script(self, text: str | list[int] = "Hello there", **values: Any) -> list[int]:
        """Set what the engine answers from now on; EOS is added to a text."""
        tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_id] if isinstance(text, str) else text
        temporary = self.directory / "script.tmp"
        temporary.write_text(json.dumps({"tokens": tokens, "record": str(self.record_path), **values}))
        temporary.rename(self.directory / SCRIPT_FILE)
        return list(tokens)

    def recorded(self) -> list[dict[str, Any]]:
        """Prompts that the engines got, warm-ups left out."""
        lines = [json.loads(line) for line in self.record_path.read_text().splitlines()] if self.record_path.exists() else []
        return [line for line in lines if not (line["ids"] == [1] and line["max_tokens"] == 1)]

    def kept(self) -> list[dict[str, Any]]:
        """Prompts that the engines were asked to pin."""
        path = self.directory / KEPT_FILE
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def current(self) -> ServerState:
        state = read_state(self.directory)
        assert state is not None
        return state

    def metrics(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/deepinfer/metrics").json()

    def stop(self, grace_s: float = 1.0) -> launcher.StopReport:
        return launcher.stop(NAME, self.base, grace_s)


def start_fake(dp: int = 1, isolation: str = "none", hicache_size_gb: float = 0, **server: Any) -> FakeServer:
    """Start in a short temporary directory: socket paths have a limit."""
    base = Path(tempfile.mkdtemp(prefix="dxt-", dir="/tmp"))
    model = write_model_dir(base / "model")
    os.environ["PYTHONPATH"] = str(ROOT)
    events: list[dict[str, Any]] = []
    options = {"port": 0, "ready_timeout_s": 40.0, "debug_faults": True, "rank_header": True, "render_route": True, **server}
    try:
        engine, hicache = EngineConfig(model=str(model), dp=dp), HiCacheConfig(size_gb=hicache_size_gb, isolation=isolation)
        plan = ServerPlan(engine, hicache, ServerConfig(**options), NAME, base, base / "run", engine_factory=FACTORY)
        state = launcher.start(plan, events.append)
    except BaseException:
        shutil.rmtree(base, ignore_errors=True)
        raise
    fake = FakeServer(base, state, Tokenizer.from_dir(model), events)
    fake.script()
    return fake


def finish(fake: FakeServer) -> None:
    """Stop if it still runs, and remove its directory."""
    try:
        if read_state(fake.directory) is not None:
            fake.stop()
    finally:
        shutil.rmtree(fake.base, ignore_errors=True)


def eventually(check: Callable[[], Any], timeout_s: float = 5.0) -> Any:
    """The first true answer of `check`, asked again and again."""
    deadline = time.monotonic() + timeout_s
    while not (answer := check()):
        assert time.monotonic() < deadline, f"still {answer!r} after {timeout_s} s"
        time.sleep(0.02)
    return answer


def group_pids(state: ServerState) -> list[int]:
    return [record.pid for record in state.processes]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
