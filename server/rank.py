"""One engine process: `python -m server.rank`. Owns an Engine, takes requests from the front, sends back what each step produced."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import zmq

from engine.process_env import prepare_process, resolve_threads
from engine.request import FinishReason, Output, Request, SamplingParams
from server import child, protocol
from server.errors import DixError, machine_error
from server.heartbeat import HeartbeatFile, start_process_thread
from server.launch import Launch, load_launch, resolve
from server.logs import open_log
from server.stillness import LoopWatch
from server.totals import Record, without_baseline

IDLE_WAIT_MS = 20
STATS_INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 0.25
WARM_UP_ID = "warm-up"
log = logging.getLogger("rank")


class EngineLike(Protocol):
    """The part of `engine.engine.Engine` that a rank uses; the tests' scripted engine has it too."""

    limits: Any

    @property
    def kv_format(self) -> str: ...
    @property
    def idle(self) -> bool: ...
    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Output]: ...
    def reset_prefix_cache(self) -> None: ...
    def set_prefill_intervals(self, attempt: int | None, any_: int | None) -> None: ...
    def leave(self) -> None: ...
    @property
    def left(self) -> bool: ...
    @property
    def waits_for_peers(self) -> bool: ...
    @property
    def prefill_intervals(self) -> tuple[int, int]: ...
    def stats(self) -> dict[str, Any]: ...
    def explain_prompt(self, tokens: list[int], salt: str = "", scope: str = "") -> dict[str, Any]: ...
    def keep_prefix(self, tokens: list[int], salt: str, ttl_s: float) -> dict[str, Any]: ...
    def inject_fault(self, kind: str, **where: Any) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Link:
    """The socket to the front. Sends never block: without a front there is nobody left to serve, and the supervisor ends this process."""

    def __init__(self, address: str, rank: int, incarnation: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, protocol.rank_address(rank, incarnation))
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(address)

    def send(self, message: protocol.FromRank) -> None:
        self._socket.send(protocol.encode(message))

    def receive(self) -> protocol.ToRank | None:
        """The next waiting message, or None."""
        # Asked before every step and mostly in vain: a look costs half of an exception.
        return protocol.decode_to_rank(self._socket.recv()) if self._socket.poll(0) else None

    def wait(self, milliseconds: int) -> None:
        self._socket.poll(milliseconds)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Report:
    """The pipe to the supervisor: one JSON object per line."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._file = os.fdopen(descriptor, "w", buffering=1)

    def __call__(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")


class RankLoop:
    """Drain input, step, send outputs; sleep only when the whole group is idle."""

    def __init__(
        self, engine: EngineLike, link: Link, tick: Callable[[], None], on_warm: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.engine = engine
        self.link = link
        self.tick = tick
        self.on_warm = on_warm
        self.clock = clock
        self.stopping = False
        self._baseline: Record = {}
        self._stats_due_s = 0.0
        self._changes: list[protocol.SetScheduling] = []

    def run(self) -> None:
        """Serve until `stopping`, which ends all coupled ranks in one step. The first request is our own: a rank is ready when one token
        came through the normal path."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self.engine.add_request(Request(WARM_UP_ID, [self.engine.limits.eos_token_id], params, cache_read=False, cache_write=False))
        while not self.engine.left:
            if self.stopping:
                self.engine.leave()
            self._drain()
            outputs = self.engine.step()
            self.tick()
            self._publish(outputs)
            if self._changes:
                self._answer_changes()
            if self.engine.idle:
                self.link.wait(IDLE_WAIT_MS)

    def _drain(self) -> None:
        while (message := self.link.receive()) is not None:
            self._apply(message)

    def _apply(self, message: protocol.ToRank) -> None:
        match message:
            case protocol.AddRequest(request, explain):
                if explain:  # before the request itself leaves anything in the cache
                    self._reply(
                        explain, lambda: self.engine.explain_prompt(request.prompt_token_ids, request.cache_salt, request.cache_scope)
                    )
                try:
                    self.engine.add_request(request)
                except DixError as error:
                    self.link.send(protocol.Refused(request.request_id, str(error)))
            case protocol.Abort(request_ids):
                for request_id in request_ids:
                    self.engine.abort(request_id)
            case protocol.ResetCache(operation):
                self._reply(operation, self._reset)
            case protocol.ExplainPrompt(operation, token_ids, salt, scope):
                self._reply(operation, lambda: self.engine.explain_prompt(token_ids, salt, scope))
            case protocol.KeepPrefix(operation, token_ids, salt, ttl_s):
                self._reply(operation, lambda: self.engine.keep_prefix(token_ids, salt, ttl_s))
            case protocol.SetScheduling():
                self._set_intervals(message)
            case protocol.Fault(operation, kind, arguments):
                self._reply(operation, lambda: self._break(kind, arguments))
            case protocol.Wake():
                pass

    def _reply(self, operation: int, action: Callable[[], dict[str, Any]]) -> None:
        try:
            self.link.send(protocol.Reply(operation, action()))
        except (DixError, ValueError) as error:
            self.link.send(protocol.Reply(operation, {}, str(error)))

    def _reset(self) -> dict[str, Any]:
        self.engine.reset_prefix_cache()
        return {}

    def _set_intervals(self, message: protocol.SetScheduling) -> None:
        """The change travels with the next vote; the answer waits until a vote applied it."""
        attempt, any_ = message.prefill_attempt_interval, message.prefill_any_interval
        try:
            self.engine.set_prefill_intervals(attempt, any_)
        except DixError as error:
            self.link.send(protocol.Reply(message.operation, {}, str(error)))
            return
        self._changes.append(message)

    def _answer_changes(self) -> None:
        have_attempt, have_any = self.engine.prefill_intervals
        for message in list(self._changes):
            if message.prefill_attempt_interval in (None, have_attempt) and message.prefill_any_interval in (None, have_any):
                self._changes.remove(message)
                values = {"prefill_attempt_interval": have_attempt, "prefill_any_interval": have_any}
                self.link.send(protocol.Reply(message.operation, values))

    def _break(self, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if kind == "exit":
            os._exit(17)
        if kind == "raise":
            raise RuntimeError("fault injected by request")
        while kind == "hang":
            time.sleep(1.0)
        return self.engine.inject_fault(kind, **arguments)

    def _publish(self, outputs: list[Output]) -> None:
        mine = [output for output in outputs if output.request_id == WARM_UP_ID]
        theirs = [output for output in outputs if output.request_id != WARM_UP_ID] if mine else outputs
        for output in mine:
            self._finish_warm_up(output)
        if theirs:
            self.link.send(protocol.Outputs(theirs))
        self._send_stats()

    def _finish_warm_up(self, output: Output) -> None:
        if output.finish_reason is None:
            return
        if output.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
            raise RuntimeError(f"the warm-up request ended with {output.finish_reason}: {output.error}")
        self._baseline = self.engine.stats()
        self.on_warm()

    def _send_stats(self) -> None:
        now = self.clock()
        if now < self._stats_due_s:
            return
        self._stats_due_s = now + STATS_INTERVAL_S
        # Also when nothing changed: the front can then tell how old the figures are.
        self.link.send(protocol.Stats(without_baseline(self.engine.stats(), self._baseline)))


class ProgressReport:
    """Loading progress to the supervisor: every new stage, its end, and in between at most four lines a second."""

    def __init__(self, report: Report, clock: Callable[[], float]) -> None:
        self._report = report
        self._clock = clock
        self._stage = ""
        self._due_s = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        now = self._clock()
        if stage == self._stage and fraction < 1.0 and now < self._due_s:
            return
        self._stage, self._due_s = stage, now + PROGRESS_INTERVAL_S
        self._report("progress", stage=stage, fraction=fraction)


def build_engine(
    launch: Launch, rank: int, incarnation: int, on_progress: Callable[[str, float], None], on_lost: Callable[[str], None]
) -> EngineLike:
    """The real engine, joined to its peers when there are several ranks. on_lost: called from a thread when another host is gone."""
    hosts = launch.hosts
    config = replace(launch.engine, num_threads=resolve_threads(launch.engine.num_threads, launch.local_ranks))
    prepare_process(config.num_threads, launch.local_ranks, peers_at="" if hosts is None else hosts.address)

    # Thread counts are fixed when torch loads, so these imports come after `prepare_process`.
    from engine.distributed import GlooGroup, Group
    from engine.engine import Engine

    group: Group | None = None
    if hosts is not None:
        group = GlooGroup(launch.group_rank(rank), config.dp, host=hosts.address, port=hosts.port, timeout_s=config.collective_timeout_s)
        group.watch(on_lost)
    elif config.dp > 1:
        group = GlooGroup(rank, config.dp, init_file=str(launch.rendezvous_path(incarnation)), timeout_s=config.collective_timeout_s)
    engine: EngineLike = Engine(config, launch.hicache, group, on_progress=on_progress, cache_home=launch.cache_home(rank))
    return engine


def rank_limits(limits: Any, block_size: int, kv_format: str = "") -> protocol.RankLimits:
    """What the front needs of the engine's limits; names are the same on both sides."""
    return protocol.RankLimits(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=limits.vocab_size,
        eos_token_id=limits.eos_token_id,
        keep_tokens=limits.keep_tokens,
        num_blocks=limits.num_blocks,
        block_size=block_size,
        precision=str(limits.precision),
        device=str(limits.device),
        fingerprint=str(getattr(limits, "fingerprint", "")),
        kv_format=kv_format,
    )


def serve(launch: Launch, rank: int, incarnation: int, report: Report) -> None:
    heartbeat = HeartbeatFile(launch.heartbeat_path)
    watch = LoopWatch()
    start_process_thread(heartbeat, rank, look=watch.look)
    heartbeat.announce(rank, launch.server.ready_timeout_s)
    link = Link(launch.socket_address, rank, incarnation)

    def leave(reason: str) -> None:
        report("fatal", message=reason, hint="see the logs of the other hosts", exit_code=4, echo=True)
        os._exit(4)  # the loop may be waiting for the lost rank in a collective

    build = resolve(launch.engine_factory) if launch.engine_factory else partial(build_engine, on_lost=leave)
    engine = build(launch, rank, incarnation, ProgressReport(report, time.monotonic))

    def on_warm() -> None:
        gc.collect()
        gc.freeze()  # model and pools stay to the end: later collections need not walk over them
        heartbeat.announce(rank, launch.server.hang_timeout_s)
        watch.arm(lambda: engine.waits_for_peers)
        limits = rank_limits(engine.limits, launch.engine.block_size, engine.kv_format)
        link.send(protocol.Ready(os.getpid(), limits))
        report("ready", limits={name: getattr(limits, name) for name in limits.__struct_fields__})
        log.info("ready", extra={"event": "ready"})

    loop = RankLoop(engine, link, lambda: heartbeat.tick_loop(rank), on_warm, time.monotonic)

    def stop(_number: int, _frame: Any) -> None:
        # Ranks on other hosts are not asked to stop: they shall notice that these are gone, not agree to leave.
        if launch.hosts is not None:
            os._exit(0)
        loop.stopping = True

    signal.signal(signal.SIGTERM, stop)
    loop.run()
    watch.disarm()
    engine.close()
    link.close()


def main(arguments: list[str]) -> int:
    options = child.enter("server.rank", ("rank", "incarnation", "report"), arguments)
    report = Report(options.report)
    try:
        launch = load_launch(options.launch)
        open_log(launch.log_dir, f"rank-{options.rank}", launch.server.log_level)
        serve(launch, options.rank, options.incarnation, report)
    except DixError as error:
        log.error("%s", error)
        # A peer's death shows here as a lost collective: an echo, not the cause.
        echo = type(error).__name__ == "GroupError"
        report("fatal", message=str(error), hint=error.hint, exit_code=error.exit_code, echo=echo)
        return error.exit_code
    except Exception as error:
        log.exception("rank %d failed", options.rank)
        refusal = machine_error(error)
        message, hint = (str(refusal), refusal.hint) if refusal else (f"{type(error).__name__}: {error}", "")
        code = refusal.exit_code if refusal else 4
        report("fatal", message=message, hint=hint, exit_code=code)
        return code
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # A peer or a library thread may be stuck; everything of value has been sent, so do not wait for interpreter shutdown.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
