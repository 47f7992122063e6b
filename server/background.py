"""The supervisor as a background process: how it is started and awaited, and its entry point."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from server import parent_death
from server.errors import DixError, ServerFailed, ServerUnreachable, machine_error
from server.foreground import OnEvent, supervise
from server.launch import Launch
from server.logs import tail
from server.state import Lock, ServerState, read_state

EVENTS_NAME = "events.jsonl"
POLL_S = 0.05
END_S = 25.0


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Hold back SIGINT, SIGTERM and SIGHUP until the block ends: an exception in the middle of a fork would leave an unknown child."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive in the main thread only
        return
    came: list[int] = []
    later = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in later}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def spawn(launch: Launch, state_dir: Path, api_keys: Sequence[str], lock: Lock, owned: bool) -> subprocess.Popen[bytes]:
    """Start a supervisor in its own session. Keys go through a pipe, because others can read command lines and files stay behind."""
    directory = Path(launch.server_dir)
    owner = [str(os.getpid())] if owned else []
    request = directory / "start.json"
    with open(os.open(request, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(launch))
    (directory / EVENTS_NAME).write_bytes(b"")
    with (directory / "supervisor.out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "server.background", str(request), str(state_dir), str(lock.descriptor), *owner],
            pass_fds=(lock.descriptor,),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(list(api_keys)).encode())
    process.stdin.close()
    return process


def wait_ready(process: subprocess.Popen[bytes], directory: Path, on_event: OnEvent, limit_s: float) -> ServerState:
    """Pass on the supervisor's events until it serves.

    Raises:
        DixError: the process's own failure, or ServerUnreachable after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    with (directory / EVENTS_NAME).open() as events:
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            for event in _complete_lines(events):
                on_event(event)
                if event["event"] == "error":
                    raise ServerFailed(event["message"], hint=event["hint"], exit_code=event["exit_code"])
                state = read_state(directory)
                if event["event"] == "ready" and state is not None:
                    return state
            if ended:
                lines = tail(directory / "supervisor.out")
                raise ServerFailed(
                    f"the server ended during start: {lines[-1] if lines else f'status {process.returncode}'}", hint="see: dix logs"
                )
            time.sleep(POLL_S)
    raise ServerUnreachable(f"not ready after {limit_s:.0f} s", hint="raise --ready-timeout, or see: dix logs")


def _complete_lines(events: IO[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        position = events.tell()
        line = events.readline()
        if not line.endswith("\n"):
            events.seek(position)
            return found
        found.append(json.loads(line))


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # the second one skips the drain
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(arguments: list[str]) -> int:
    """The background supervisor: `python -m server.background START_FILE STATE_DIR LOCK_FD [OWNER_PID]`, keys as JSON on stdin."""
    request, state_dir = Path(arguments[0]), Path(arguments[1])
    lock = Lock.adopt(request.parent, int(arguments[2]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # until the supervisor has handlers of its own
    if len(arguments) > 3:
        parent_death.arm(int(arguments[3]), signal.SIGTERM)
    api_keys = json.loads(sys.stdin.read())
    launch = msgspec.json.decode(request.read_bytes(), type=Launch)
    with (request.parent / EVENTS_NAME).open("a", buffering=1) as events:

        def on_event(event: dict[str, Any]) -> None:
            events.write(json.dumps(event, default=str) + "\n")

        try:
            return supervise(launch, state_dir, on_event, api_keys, lock)
        except (DixError, OSError, MemoryError) as error:
            failure = error if isinstance(error, DixError) else machine_error(error)
            if failure is None:
                raise
            on_event({"event": "error", "message": str(failure), "hint": failure.hint, "exit_code": failure.exit_code})
            return failure.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
