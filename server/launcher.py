"""Start and stop servers: in the foreground (`serve`), in the background (`start`), and from outside (`stop`)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from server import background
from server.cache_files import remove_cache
from server.errors import ServerUnreachable
from server.foreground import OnEvent, supervise, take_lock
from server.launch import recorded_grace_s
from server.plan import ServerPlan
from server.state import ServerState, clean_leftovers, is_running, read_state, same_process, server_dir
from server.supervisor import STOP_REQUEST_NAME

POLL_S = 0.05
STOP_MARGIN_S = 25.0


@dataclass(frozen=True, slots=True)
class StopReport:
    """What stopping a server took. `killed`: pids that did not end by themselves."""

    name: str
    seconds: float
    killed: list[int]


def serve(plan: ServerPlan, on_event: OnEvent) -> int:
    """Run the supervisor in this process until it is told to stop. Returns 0.

    Raises:
        PortInUse, ConfigError: before anything was started.
        ServerFailed: not ready, or a rank failed for good (`exit_code` 4, or the rank's own).
    """
    launch = plan.launch()
    return supervise(launch, plan.state_dir, on_event, plan.api_keys, take_lock(launch))


def start(plan: ServerPlan, on_event: OnEvent, *, owned: bool = False) -> ServerState:
    """Start a server in the background and return when it is ready. Its events are passed on meanwhile.
    owned: it also stops when this thread ends in whatever way; ask for that from the main thread only.

    Raises:
        DixError: the background process's own failure, or ServerUnreachable after `server.ready_timeout_s`.
    """
    launch = plan.launch()
    process: subprocess.Popen[bytes] | None = None
    lock = take_lock(launch)
    try:
        with background.interrupts_later():
            process = background.spawn(launch, plan.state_dir, plan.api_keys, lock, owned)
        lock.release()  # the supervisor holds it by the descriptor that it inherited
        return background.wait_ready(process, Path(launch.server_dir), on_event, plan.server.ready_timeout_s)
    except BaseException:
        if process is not None:
            background.end(process)
        raise
    finally:
        lock.release()


def stop(name: str, state_dir: Path, grace_s: float | None = None, *, keep_cache: bool = False) -> StopReport:
    """Stop a server and everything it started. The supervisor drains and ends its children; one that does not react is killed with them.
    keep_cache: leave what the prefix cache holds to the server's next start.

    Raises:
        ServerUnreachable: there is no such server.
    """
    began_s = time.monotonic()
    directory = server_dir(state_dir, name)
    state = read_state(directory)
    if state is None:
        raise ServerUnreachable(f'no server named "{name}" is running', hint="dix status lists the running ones")
    if not is_running(state):
        leftovers = clean_leftovers(directory)
        if not keep_cache:
            remove_cache(directory)
        return StopReport(name, time.monotonic() - began_s, [record.pid for record in leftovers])
    if grace_s is not None or keep_cache:
        request = {"grace_s": grace_s, "keep_cache": keep_cache, "boot_uuid": state.boot_uuid}
        (directory / STOP_REQUEST_NAME).write_bytes(msgspec.json.encode(request))
    os.kill(state.supervisor.pid, signal.SIGTERM)
    grace = grace_s if grace_s is not None else recorded_grace_s(directory / "launch.json")
    deadline = time.monotonic() + grace + STOP_MARGIN_S
    while same_process(state.supervisor, state.host_boot_id) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    killed = []
    if same_process(state.supervisor, state.host_boot_id):
        os.kill(state.supervisor.pid, signal.SIGKILL)
        killed.append(state.supervisor.pid)
        time.sleep(0.5)  # the kernel and the guards end the children now
    killed += [record.pid for record in clean_leftovers(directory)]
    return StopReport(name, time.monotonic() - began_s, killed)
