"""From typing a command to the first token: `dix serve tiny` with empty and with warm caches of dix, and `dix chat --once`. Not a test.

    python -m tests.server.bench_start [--repeats 3]

Files of Python and torch are in the page cache both times; with empty caches the embedded checkpoint is unpacked and the CPU step is
compiled in the background while the first tokens come from the eager path. Prints seconds, the quickest and the median.
"""

import argparse
import http.client
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0, "stream": True}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def first_token(port, process):
    """Ask until an answer begins."""
    while process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/chat/completions", json.dumps(QUESTION), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status == 200 and any(b'"content":"' in line and b'"content":""' not in line for line in reply):
                return time.perf_counter()
        except OSError:
            pass
        time.sleep(0.02)
    raise SystemExit(f"the server ended with {process.returncode}")


def serve(home):
    """Seconds until the server is ready to be asked, and until its first token."""
    port = free_port()
    environment = {**os.environ, "DIX_HOME": str(home)}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer_cli", "serve", "tiny", "--port", str(port), "--quiet"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        return first_token(port, process) - began
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def chat(home):
    """Seconds until `dix chat --once` has ended."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "deepinfer_cli", "chat", "tiny", "--once", "Hello", "--max-tokens", "16"]
    subprocess.run(command, env={**os.environ, "DIX_HOME": str(home)}, check=True, capture_output=True, timeout=120)
    return time.perf_counter() - began


def show(what, seconds):
    print(f"{what:<44} best {min(seconds):5.2f} s, median {statistics.median(seconds):5.2f} s, load {os.getloadavg()[0]:.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "home"
        serve(Path(scratch) / "warm-up")
        cold = []
        for _ in range(args.repeats):
            shutil.rmtree(home, ignore_errors=True)
            cold.append(serve(home))
        show("dix serve tiny, first token, caches empty", cold)
        show("dix serve tiny, first token, caches warm", [serve(home) for _ in range(args.repeats)])
        show("dix chat tiny --once, whole command", [chat(home) for _ in range(args.repeats)])


if __name__ == "__main__":
    main()
