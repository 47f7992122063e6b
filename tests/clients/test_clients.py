"""Clients that others wrote, unmodified, against the embedded model. `make clients` installs them and runs this."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Dix, Server, start
from tests.server.harness import finish, group_pids, start_fake

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv" / "clients"
CHECKS = ",".join(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "unsupported_method",
    ]
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    dix = Dix(tmp_path_factory.mktemp("dix-home"))
    running = start(dix, "tiny", "--dp", "2")
    yield running
    dix("stop", "tiny", "--grace", "1s")


def client(program: str, *arguments: str, timeout_s: float = 300) -> str:
    """Run a program of the clients' own environment."""
    path = ENVIRONMENT / "bin" / program
    assert path.exists(), f"{path} is missing: make clients installs it"
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    done = subprocess.run([path, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("script", ["openai_sdk.py", "litellm_gateway.py", "langchain_agent.py"])
def test_client_library_works_unmodified(served: Server, script: str) -> None:
    output = client("python", str(HERE / script), served.url)
    assert output.count("ok ") >= 3


def test_curl_streams_and_gets_json_errors(served: Server) -> None:
    body = '{"messages":[{"role":"user","content":"hi"}],"max_tokens":4,"stream":true,"ignore_eos":true}'

    def curl(data: str, *extra: str) -> str:
        command = ["curl", "-sS", "-N", *extra, f"{served.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", data]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    streamed = curl(body)
    assert streamed.endswith("data: [DONE]\n\n")
    assert all(re.match(r"data: (\{.*\}|\[DONE\])$", event) for event in streamed.strip().split("\n\n"))
    assert json.loads(curl("{", "-w", ""))["error"]["code"] == "invalid_json"
    assert curl("{", "-o", "/dev/null", "-w", "%{http_code}") == "400"


def test_own_document_holds_under_generated_requests() -> None:
    """On the scripted engine: a generated request may ask for thousands of tokens."""
    server = start_fake(docs=True, debug_faults=False)
    try:
        server.script("a short answer")
        before = group_pids(server.current())
        arguments = ["run", f"{server.url}/openapi.json", "--phases", "coverage,fuzzing", "--max-examples", "50", "--checks", CHECKS]
        output = client("schemathesis", *arguments, "--request-timeout", "30", "--seed", "1", timeout_s=800)
        print(output[-600:])
        assert group_pids(server.current()) == before
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        finish(server)
