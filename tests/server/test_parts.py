"""Small parts of the serving layer on their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import FinishReason, Output, Request, SamplingParams, Timing, TokenLogprob
from server import protocol, tickets
from server.errors import BadRequest, Unavailable
from server.fields import Fields
from server.heartbeat import PROCESS_DEAD_S, HeartbeatFile
from server.json_body import decode
from server.logs import tail
from server.rank import ProgressReport, RankLoop
from server.restart_policy import RestartPolicy
from server.schemas import Bounds, parse_common
from server.start_checks import read_keys
from server.state import server_dir
from server.tickets import Mailbox
from server.totals import added, counters_only, empty_record, merged, without_baseline

BOUNDS = Bounds(("m",), 4096, 393216)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("server.front", {"torch", "engine.engine", "transformers"}),
        ("server.launcher", {"torch", "fastapi", "uvicorn", "zmq", "pydantic", "tokenizers"}),
        ("server.rank", {"torch", "fastapi", "uvicorn"}),
    ],
)
def test_module_does_not_load_what_its_process_does_not_need(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(','.join({forbidden!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_messages_survive_the_wire() -> None:
    params = SamplingParams(logit_bias={5: -3.0}, stop_token_ids=(1, 2), seed=-(2**63), logprobs=True, top_logprobs=2)
    request = protocol.AddRequest(Request("a", [1, 2, 3], params, cache_read=False))
    assert protocol.decode_to_rank(protocol.encode(request)) == request
    output = Output("a", [7], FinishReason.STOP, 1, (TokenLogprob(-0.5, [(7, -0.5)]),), 3, Timing(0.1, 0.2, 0.3))
    assert protocol.decode_from_rank(protocol.encode(protocol.Outputs([output]))) == protocol.Outputs([output])
    assert protocol.parse_address(protocol.rank_address(3, 12)) == (3, 12)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c))
)
def test_any_field_value_parses_or_is_a_bad_request(value: Any) -> None:
    names = (
        "temperature",
        "top_k",
        "n",
        "stop",
        "logit_bias",
        "seed",
        "stream",
        "stream_options",
        "prefix_cache",
        "max_tokens",
        "logprobs",
    )
    for name in names:
        try:
            parsed = parse_common({name: value}, BOUNDS, chat=True)
        except BadRequest:
            continue
        parsed.params(0, 16)


def test_nesting_limit_is_sixty_four() -> None:
    assert decode(b"[" * 64 + b"]" * 64)
    with pytest.raises(BadRequest):
        decode(b"[" * 65 + b"]" * 65)


def test_integral_floats_are_integers() -> None:
    assert Fields({"n": 3.0}).integer("n", 1, 8) == 3
    for bad in (True, 3.5, "3", float("inf"), float("nan")):
        with pytest.raises(BadRequest):
            Fields({"n": bad}).integer("n", 1, 8)


def test_choice_seeds_wrap_around_at_the_end_of_int64() -> None:
    request = parse_common({"seed": 2**63 - 1, "n": 2}, BOUNDS, chat=True)
    assert [request.params(i, 4).seed for i in range(2)] == [2**63 - 1, -(2**63)]


def test_restarts_are_limited_in_ten_minutes_and_then_allowed_again() -> None:
    policy = RestartPolicy("on-failure")
    assert [policy.next_pause_s(at) for at in (0, 10, 20, 30)] == [1.0, 5.0, 30.0, None]
    assert policy.next_pause_s(601) == 30.0
    assert policy.next_pause_s(2000) == 1.0
    assert RestartPolicy("never").next_pause_s(0) is None


def test_heartbeats_tell_a_hung_loop_from_a_stopped_process(tmp_path: Path) -> None:
    beats = HeartbeatFile(tmp_path / "beats", slots=2)
    beats.reset(0, 100.0)
    beats.reset(1, 100.0)
    assert beats.read(0).complaint == ""
    beats.announce(0, 0.01)
    time.sleep(0.02)
    assert "step loop" in beats.read(0).complaint
    beats.tick_loop(0)
    assert (beats.read(0).complaint, beats.read(0).count) == ("", 2)
    assert "process" in type(beats.read(1))(0.0, PROCESS_DEAD_S + 1, 100.0, 0).complaint


def test_retired_counters_stay_and_gauges_go() -> None:
    record = merged(empty_record(), {"running": 3, "kv": {"tokens_total": 9, "tokens_used": 4}, "tokens": {"prompt_total": 7}, "odd": None})
    record = merged(record, {"prefix_cache": {"frames": {"free": 5}, "miss_total": {"short": 2}}})
    retired = counters_only(record)
    assert (retired["running"], retired["kv"], retired["tokens"]["prompt_total"]) == (0, {"tokens_total": 0, "tokens_used": 0}, 7)
    assert (retired["prefix_cache"]["frames"], retired["prefix_cache"]["miss_total"]) == ({"free": 0}, {"short": 2})
    assert added(record, retired)["tokens"]["prompt_total"] == 14
    assert "odd" not in record


def test_warm_up_is_taken_out_of_counters_only() -> None:
    base = {"steps_total": 2, "kv": {"tokens_total": 10}, "tokens": {"prompt_total": 1}, "miss_total": {"bypass": 1}, "running": 1}
    now = {
        "steps_total": 5,
        "kv": {"tokens_total": 10},
        "tokens": {"prompt_total": 8},
        "miss_total": {"bypass": 1, "short": 2},
        "running": 2,
    }
    assert without_baseline(now, base) == {
        "steps_total": 5, "kv": {"tokens_total": 10}, "tokens": {"prompt_total": 7}, "miss_total": {"bypass": 0, "short": 2}, "running": 2,
    }  # fmt: skip


def test_progress_is_thinned_but_stages_and_ends_get_through() -> None:
    seen: list[tuple[str, float]] = []
    now = [0.0]

    def report(_event: str, stage: str, fraction: float) -> None:
        seen.append((stage, fraction))

    progress = ProgressReport(report, lambda: now[0])  # type: ignore[arg-type]
    for step in range(1, 101):
        now[0] += 0.01
        progress("weights", step / 100)
    progress("warm-up", 0.0)
    assert len(seen) < 10
    assert (seen[0], seen[-2], seen[-1]) == (("weights", 0.01), ("weights", 1.0), ("warm-up", 0.0))


async def test_mailbox_delivers_what_arrived_before_a_failure() -> None:
    box = Mailbox()
    box.put(0, Output("a", [1]))
    box.fail(Unavailable("rank_failed", "gone"))
    assert [output.token_ids for _, output in await box.get(1)] == [[1]]
    with pytest.raises(Unavailable):
        await box.get(1)


async def test_a_reader_may_be_behind_for_a_while_and_is_given_up_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(tickets, "time", SimpleNamespace(monotonic=lambda: now[0]))
    box = Mailbox()

    def all_taken(count: int) -> bool:
        return all(box.put(0, Output("a", [1])) for _ in range(count))

    assert all_taken(2 * tickets.MAX_MAIL)
    now[0] += tickets.SLOW_READER_S - 1
    assert all_taken(1)
    while len(await box.get(1)) == tickets.MAX_BATCH:  # it catches up, and has all the time again
        pass
    assert all_taken(tickets.MAX_MAIL)
    now[0] += tickets.SLOW_READER_S - 1
    assert all_taken(1)
    now[0] += 1
    assert not box.put(0, Output("a", [1]))


async def test_mailbox_wakes_its_reader_and_a_sweep_ends_a_long_silence() -> None:
    box = Mailbox()
    reading = asyncio.create_task(box.get(5.0))
    await asyncio.sleep(0)
    box.end_silence(time.monotonic() + 4.0)
    await asyncio.sleep(0)
    assert not reading.done()
    box.end_silence(time.monotonic() + 5.1)
    assert await reading == []
    asyncio.get_running_loop().call_later(0.01, box.put, 2, Output("a", [5]))
    assert (await box.get(1))[0][0] == 2


def test_a_failed_warm_up_ends_the_rank() -> None:
    class Broken:
        limits = type("L", (), {"eos_token_id": 1})()
        idle, left = True, False

        def add_request(self, request: Request) -> None:
            self.name = request.request_id

        def step(self) -> list[Output]:
            return [Output(self.name, [], FinishReason.ERROR, error="nan")]

        def stats(self) -> dict[str, Any]:
            return {}

    class Silent:
        def receive(self) -> None:
            return None

    loop = RankLoop(Broken(), Silent(), lambda: None, lambda: None, time.monotonic)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="warm-up"):
        loop.run()


def test_key_files_hold_one_key_per_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(" a \n\nb\n")
    assert read_keys(str(path)) == ["a", "b"]
    assert read_keys("") == []
    path.write_text("\n")
    for bad in (path, tmp_path / "none"):
        with pytest.raises(Exception, match="api_key_file"):
            read_keys(str(bad))


def test_server_names_cannot_leave_the_state_directory(tmp_path: Path) -> None:
    for name in ("../../etc", "/abs", "..", "", "a/b"):
        assert server_dir(tmp_path, name).parent == tmp_path / "servers"


def test_tail_gives_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"{i}\n" for i in range(100)))
    assert tail(path, 3) == ["97", "98", "99"]
    assert tail(tmp_path / "none") == []
