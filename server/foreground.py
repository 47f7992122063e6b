"""Run a server's supervisor in this process: take the lock on its name, check and prepare its files, and tidy up afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hicache.sizing import available_host_bytes
from server import listener
from server.cache_files import KEPT_NAME, keep_cache, remove_cache, remove_orphans, segments
from server.errors import ConfigError
from server.launch import Launch
from server.logs import open_log
from server.start_checks import check_exposure, check_gpus, check_memory, check_warm_file, read_keys
from server.state import Lock, clean_leftovers, is_running, read_state, remove_boot_dir
from server.supervisor import Supervisor

OnEvent = Callable[[dict[str, Any]], None]


def take_lock(launch: Launch) -> Lock:
    """The right to run this server, or ConfigError. Whoever has it owns the server's directory."""
    directory = Path(launch.server_dir)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = Lock(directory)
    if lock.acquire():
        return lock
    state = read_state(directory)
    pid = f" (pid {state.supervisor.pid})" if state is not None and is_running(state) else ""
    raise ConfigError(f'a server named "{launch.name}" is running already{pid}', hint=f"dix stop {launch.name}, or choose another --name")


def supervise(launch: Launch, state_dir: Path, on_event: OnEvent, api_keys: Sequence[str], lock: Lock) -> int:
    """Run the supervisor. It owns `lock` from now on."""
    directory = Path(launch.server_dir)
    try:
        killed = clean_leftovers(directory)
        _find_cache(directory)
        keys = [*api_keys, *read_keys(launch.server.api_key_file)]
        check_exposure(launch.server, keys, on_event)
        check_warm_file(launch)
        check_memory(launch.local_ranks, available_host_bytes())
        check_gpus(launch)
        launch_path = launch.prepare()
        open_log(launch.log_dir, "supervisor", launch.server.log_level)
        with listener.bind(launch.server.host, launch.server.port, state_dir) as sock:
            for record in killed:
                on_event({"event": "leftover_killed", "process": record.label, "pid": record.pid})
            on_event({"event": "bound", "host": sock.getsockname()[0], "port": sock.getsockname()[1]})
            return _run(Supervisor(launch, launch_path, sock, on_event, keys), directory)
    finally:
        remove_boot_dir(launch.boot_dir, launch.boot_uuid)  # if it failed between making it and running
        lock.release()


def _find_cache(directory: Path) -> None:
    """Before a start: keep what this server left for reuse, also when it was killed, and remove what no server owns."""
    had = (directory / KEPT_NAME).exists() or any(segments(directory))
    keep_cache(directory)  # so that its own segments do not count as orphans while it is not running yet
    remove_orphans()
    if not had:
        remove_cache(directory)
    (directory / KEPT_NAME).unlink(missing_ok=True)


def _run(supervisor: Supervisor, directory: Path) -> int:
    try:
        return supervisor.run()
    finally:
        if supervisor.keep_cache:
            keep_cache(directory)
        else:
            remove_cache(directory)
