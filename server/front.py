"""The HTTP process: `python -m server.front`. Serves from its first moment (503 until ready) on the socket that the supervisor bound."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import sys
from functools import partial
from typing import Any

import uvicorn
import uvloop

from hicache.build_directory import build_directory
from hicache.config import HiCacheConfig
from hicache.keys import KeySpace
from hicache.native_keys import open_chain
from server import child
from server.app import create_app
from server.channel import send_line
from server.connection import Connection
from server.errors import ApiError, DixError, ServerFailed, Unavailable
from server.front_state import Front
from server.grammar_check import GrammarCheck
from server.heartbeat import HeartbeatFile, start_process_thread
from server.json_body import Bodies
from server.launch import Launch, load_launch
from server.logs import open_log
from server.metrics import FrontMetrics
from server.prometheus import RankCollector
from server.prompt_keys import BLOCK
from server.rank_index import RankIndexes
from server.rank_pool import RankPool
from server.route_cost import RestoreRule
from server.router import Router
from server.sampled_ids import SampledIds
from server.tenants import Tenants
from server.text import load_text
from server.turn_memory import TurnMemory
from server.warm_file import read_warm_file
from server.warm_up import warm_up
from server.workers import Workers

CLOSE_PATIENCE_S = 1.0
# A step of many streams allocates thousands of short-lived objects that reference counts free; a collection in each step stalls them all.
GC_THRESHOLDS = (20_000, 20, 50)
log = logging.getLogger("front")


def build_front(launch: Launch) -> Front:
    router = Router(launch.server.routing, most_bytes=int(launch.server.router_mb * 2**20))
    heartbeats = HeartbeatFile(launch.heartbeat_path)
    pool = RankPool(launch.socket_address, launch.local_ranks, launch.server, router, heartbeats, launch.engine.cp)
    metrics = FrontMetrics(launch.served_name)
    pool.on_output = metrics.on_output
    metrics.registry.register(RankCollector(metrics, pool, launch.server.metric_namespaces))
    tenants = Tenants(launch.hicache.isolation, launch.read_cache_secret())
    workers = Workers()
    bodies = Bodies(launch.server.max_body_bytes, workers)
    half = int(launch.server.sampled_ids_mb * 2**20 / 2)
    memories = SampledIds(half), TurnMemory(half)
    return Front(launch, pool, metrics, workers, bodies, GrammarCheck(launch.engine.model), *memories, tenants)


def restore_rule(hicache: HiCacheConfig, keep_tokens: int) -> RestoreRule | None:
    """What the router must know of the ranks' caches; None when they have none."""
    if not hicache.enabled or keep_tokens <= 0:
        return None
    return RestoreRule(keep_tokens, hicache.min_restore_tokens, hicache.herd_min_tokens)


class Control:
    """The channel to the supervisor: its news in, ours out."""

    def __init__(self, front: Front, server: uvicorn.Server, connection: socket.socket) -> None:
        self.front = front
        self.server = server
        self.connection = connection
        self._ready_incarnation = 0
        self._warm_up: asyncio.Task[None] | None = None
        front.tell = self.tell
        front.pool.on_ready = self.maybe_serve

    def tell(self, message: dict[str, Any]) -> None:
        # A few short lines in the life of a server: the socket's buffer always has room.
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    async def listen(self) -> None:
        """Until the supervisor closes the channel, which it only does by dying."""
        reader, _writer = await asyncio.open_connection(sock=self.connection.dup())
        async for line in reader:
            await self._apply(json.loads(line))
        os._exit(70)

    async def _apply(self, message: dict[str, Any]) -> None:
        pool, watchdog = self.front.pool, self.front.metrics.watchdog
        match message["op"]:
            case "keys":
                self.front.keys = [key.encode() for key in message["keys"]]
            case "incarnation":
                pool.begin_incarnation(message["incarnation"])
                watchdog.restarts_total += message["incarnation"] > 1
            case "ready":
                self._ready_incarnation = message["incarnation"]
                self.maybe_serve()
            case "failed":
                watchdog.deaths_total += message["kind"] == "death"
                watchdog.hangs_total += message["kind"] == "hang"
                pool.dead = not message["restarting"]
                if message["crash"]:
                    self.front.poison.blame(pool.running_on(message["rank"]))
                failed = pool.fail_all(Unavailable("rank_failed", "an engine process failed and its requests were ended", retry_after_s=2))
                watchdog.failed_requests_total += failed
                pool.router.forget(view.rank for view in pool.ranks)
                log.error("%s; failed %d open requests", message["message"], failed)
            case "drain":
                pool.draining = True
                self.front.check_drained()
            case "finish":
                await self._finish()

    def maybe_serve(self) -> None:
        """Begin to serve once the supervisor, every rank of this incarnation and the tokenizer are ready."""
        pool = self.front.pool
        if pool.serving or self._ready_incarnation != pool.incarnation or not pool.all_connected or not self.front.text_loaded:
            return
        pool.serving = True
        self._open_indexes()
        pool.warming = bool(self.front.config.warm)
        if pool.warming:
            self._warm_up = asyncio.create_task(self._warm(pool.incarnation))
            self._warm_up.add_done_callback(_exit_on_bug)
        else:
            self._say_ready()

    def _say_ready(self) -> None:
        self.tell({"event": "serving", "incarnation": self.front.pool.incarnation})

    async def _warm(self, incarnation: int) -> None:
        """Fill the caches of this incarnation's ranks, then say that they serve. Ranks that fail meanwhile are the supervisor's matter."""
        front, pool = self.front, self.front.pool
        failure: DixError | None = None
        try:
            await warm_up(front, await front.workers.run(read_warm_file, front.config.warm))
        except DixError as error:
            failure = error
        except ApiError as error:
            failure = ServerFailed(f"the warm-up failed: {error.message}", hint="dix logs")
        if pool.incarnation != incarnation or not pool.serving or pool.draining:
            return
        if failure is not None:
            log.error("%s", failure)
        if failure is not None and incarnation <= 1:
            self.tell({"event": "fatal", "message": str(failure), "hint": failure.hint, "exit_code": failure.exit_code})
            return
        pool.warming = False
        self._say_ready()

    def _open_indexes(self) -> None:
        """For routing by cost: read what the ranks' caches hold. Requests that come earlier are routed by what was sent where."""
        launch, pool, limits = self.front.launch, self.front.pool, self.front.pool.limits
        if launch.server.routing != "cost" or limits is None or not limits.kv_format or limits.block_size != BLOCK:
            return
        pool.router.costs.rule = restore_rule(launch.hicache, limits.keep_tokens)
        if pool.router.costs.rule is None:
            return
        space = KeySpace(limits.fingerprint, limits.kv_format, limits.block_size, secret=launch.read_cache_secret())
        paths = {view.rank: launch.cache_home(view.rank).path(view.rank) for view in pool.ranks}
        shared, incarnation = launch.hicache.share and launch.hicache.segment == "auto", pool.incarnation

        def attach(indexes: RankIndexes) -> None:
            pool.ask_caches(indexes, incarnation)

        self.front.workers.then(partial(RankIndexes.open, shared=shared), space, paths, callback=attach)
        if launch.hicache.native_keys:
            self.front.workers.then(open_chain, build_directory(launch.hicache), callback=partial(setattr, space, "chain"))

    async def _finish(self) -> None:
        self.front.pool.draining = True
        self.front.pool.fail_all(Unavailable("draining", "the server is shutting down"))
        for _ in range(int(CLOSE_PATIENCE_S / 0.02)):
            if self.front.pool.num_open == 0:
                break
            await asyncio.sleep(0.02)
        self.server.should_exit = True

    async def prepare_text(self) -> None:
        try:
            self.front.set_text(await self.front.workers.run(load_text, self.front.launch))
            gc.collect()
            gc.freeze()  # what lives from here on to the end need not be looked at in every collection
            gc.set_threshold(*GC_THRESHOLDS)
        except DixError as error:
            log.error("%s", error)
            self.tell({"event": "fatal", "message": str(error), "hint": error.hint, "exit_code": error.exit_code})
            return
        self.maybe_serve()


async def run(launch: Launch, control: socket.socket, listener: socket.socket) -> None:
    front = build_front(launch)
    limits = {"header_timeout_s": launch.server.header_timeout_s, "write_timeout_s": launch.server.write_timeout_s}
    connection = type("Connection", (Connection,), limits)
    config = uvicorn.Config(
        create_app(front),
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=120,
        timeout_graceful_shutdown=1,
        backlog=1024,
    )
    server = uvicorn.Server(config)
    slot = launch.local_ranks  # behind those of the ranks
    front.pool.heartbeats.announce(slot, launch.server.hang_timeout_s)
    start_process_thread(front.pool.heartbeats, slot)

    def beat() -> None:
        front.pool.heartbeats.tick_loop(slot)

    channel = Control(front, server, control)
    tasks = [
        asyncio.create_task(work)
        for work in (
            front.pool.receive_forever(),
            channel.listen(),
            channel.prepare_text(),
            front.metrics.watch_loop(beat),
            front.pool.sweep_forever(),
        )
    ]
    for task in tasks:
        task.add_done_callback(_exit_on_bug)
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()
    front.workers.close()


def _exit_on_bug(task: asyncio.Task[None]) -> None:
    """A background task of the front never fails in normal operation; without it the front is useless, so it must not linger."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("front task failed", exc_info=error)
        logging.shutdown()
        os._exit(70)


def main(arguments: list[str]) -> None:
    options = child.enter("server.front", ("control", "listener"), arguments)
    control = socket.socket(fileno=options.control)
    listener = socket.socket(fileno=options.listener)
    for inherited in (control, listener):
        inherited.set_inheritable(False)
    try:
        launch = load_launch(options.launch)
    except DixError as error:
        send_line(control, {"event": "fatal", "message": str(error), "hint": error.hint, "exit_code": error.exit_code})
        sys.exit(error.exit_code)
    open_log(launch.log_dir, "front", launch.server.log_level)
    uvloop.run(run(launch, control, listener))


if __name__ == "__main__":
    main(sys.argv[1:])
    logging.shutdown()
    os._exit(0)  # worker threads may still tokenise for clients that are gone
