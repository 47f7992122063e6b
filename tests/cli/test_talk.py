"""Commands that talk to a live server: chat, cache stats, status, logs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_cli.api import Answer
from deepinfer_cli.commands.chat import stats_line
from deepinfer_cli.commands.logs import parse_lines, read_new
from deepinfer_cli.commands.serve import plan_server
from deepinfer_cli.invocation import Shared, prepare
from deepinfer_cli.live import checksum_errors, from_metrics
from deepinfer_cli.narrator import Narrator
from deepinfer_cli.sse import StreamError, StreamState
from server.state import ServerState, host_boot_id, record_self, write_state
from tests.cli.fake_server import serving

Dix = Callable[..., Any]


def record_server(home: Path, name: str, port: int, *, alive: bool = True, state: str = "ready", failure: str = "") -> None:
    """A state file whose supervisor is this test, or a process that is gone."""
    folder = home / "state" / "servers" / name
    folder.mkdir(parents=True)
    me = record_self("supervisor")
    supervisor = me if alive else dataclasses.replace(me, start_time="1")
    write_state(
        folder,
        ServerState(
            name=name, boot_uuid="b", host_boot_id=host_boot_id(), host="127.0.0.1", port=port, model="m", served_name="fake", state=state,
            supervisor=supervisor, last_failure=failure, started_unix_s=1.0, log_dir=str(folder / "logs"),
        ),
    )  # fmt: skip


def test_chat_once_prints_the_answer_on_stdout_and_the_numbers_on_stderr(dix: Dix) -> None:
    with serving() as server:
        ran = dix("chat", "--port", server.port, "--once", "hello", "--max-tokens", 5, "--system", "be brief", "--think", "off")
        body = server.requests[0]
    assert ran.code == 0
    assert len(ran.out.split()) == 5
    assert "TTFT" in ran.err
    assert "5 tokens · 0 from prefix cache" in ran.err
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert body["thinking"] == {"type": "disabled"}


def test_chat_reads_piped_text(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    with serving() as server:
        assert dix("chat", server.url, "--max-tokens", 3).code == 0
        assert server.requests[0]["messages"] == [{"role": "user", "content": "from a pipe"}]


def test_chat_json_is_one_document(dix: Dix) -> None:
    with serving() as server:
        ran = dix("chat", "--url", server.url, "--once", "hello", "--max-tokens", 4, "--json")
    assert ran.json["schema"] == "dix.chat/1"
    assert ran.json["usage"]["completion_tokens"] == 4


def test_chat_finds_the_running_server_by_name_and_alone(dix: Dix, home: Path) -> None:
    with serving() as server:
        record_server(home, "demo", server.port)
        assert dix("chat", "demo", "--once", "hi", "--max-tokens", 2).code == 0
        assert dix("chat", "--once", "hi", "--max-tokens", 2).code == 0
        assert len(server.requests) == 2


def test_several_servers_must_be_told_apart(dix: Dix, home: Path) -> None:
    record_server(home, "one", 1)
    record_server(home, "two", 2)
    ran = dix("cache", "stats")
    assert ran.code == 2
    assert "--port 1 or --port 2" in ran.err
    assert "one, two" in dix("logs").err


def test_interactive_chat_keeps_history_until_reset(dix: Dix, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["first", "second", "/reset", "third", "/exit"])
    monkeypatch.setattr("sys.stdin", Tty())
    monkeypatch.setattr("builtins.input", lambda _prompt="": next(lines))
    with serving() as server:
        assert dix("chat", "--port", server.port, "--max-tokens", 2).code == 0
        lengths = [len(body["messages"]) for body in server.requests]
    assert lengths == [1, 3, 1]


def test_a_broken_answer_exits_4(dix: Dix) -> None:
    with serving(fault="error") as server:
        ran = dix("chat", "--port", server.port, "--once", "a message of more than ten words so that the fault applies here")
    assert ran.code == 4
    assert "the answer broke off: rank 0 died" in ran.err


def test_cache_stats_shows_the_counters(dix: Dix) -> None:
    with serving() as server:
        server.looked, server.hits = 1000, 250
        out = dix("cache", "stats", "--port", server.port).out
        document = dix("cache", "stats", "--port", server.port, "--json").json
    assert "25.0%" in out
    assert document["ranks"][0]["hit_tokens_total"] == 250


def test_status_shows_a_live_and_a_dead_server(dix: Dix, home: Path) -> None:
    with serving() as server:
        record_server(home, "alive", server.port)
        record_server(home, "gone", 1, alive=False, failure="killed, out of memory")
        out = dix("status").out
        document = {each["name"]: each for each in dix("status", "--json").json["servers"]}
    assert "25%" in out  # device KV: 250 of 1,000 tokens
    assert "ended without stop; before: killed, out of memory → dix logs gone" in out
    assert document["alive"]["state"] == "ready"
    assert document["alive"]["running"] == 1
    assert document["gone"]["state"] == "stopped"
    assert dix("status", "gone").code == 4


def test_a_server_that_does_not_answer_is_named_so(dix: Dix, home: Path) -> None:
    with serving() as server:
        port = server.port
    record_server(home, "mute", port)
    assert dix("status", "--json").json["servers"][0]["state"] == "not answering"


def test_rates_need_two_samples_and_totals_keep_replaced_ranks() -> None:
    metrics: dict[str, Any] = {
        "state": "ready",
        "ranks": [{"tokens": {"generated_total": 5}}],
        "totals": {"tokens": {"generated_total": 105}},
    }
    first = from_metrics(metrics, None, 10.0)
    assert first.tok_s is None
    metrics["totals"]["tokens"]["generated_total"] = 205
    assert from_metrics(metrics, first, 12.0).tok_s == pytest.approx(50)


def test_checksum_errors_are_found_wherever_they_are_counted() -> None:
    ranks = [{"prefix_cache": {"checksum_errors_total": 2}}, {"prefix_cache": {"audit": {"checksum_errors": 1}}}, {}]
    assert checksum_errors({"ranks": ranks}) == 3


def test_logs_merge_processes_by_time_and_filter_by_level(dix: Dix, home: Path) -> None:
    record_server(home, "demo", 1)
    logs = home / "state" / "servers" / "demo" / "logs"
    logs.mkdir()
    lines = {"rank-0": [("10", "info", "loaded"), ("30", "error", "died")], "front": [("20", "warning", "slow")]}
    for source, entries in lines.items():
        text = "".join(
            json.dumps({"time": f"2026-01-01T00:00:{t}Z", "level": v, "source": source, "message": m}) + "\n" for t, v, m in entries
        )
        (logs / f"{source}.log").write_text(text)
    shown = dix("logs").out.splitlines()
    assert [line.split()[-1] for line in shown] == ["loaded", "slow", "died"]
    assert len(dix("logs", "--level", "warning").out.splitlines()) == 2
    assert dix("logs", "--lines", 1).out.split()[-1] == "died"
    events = [json.loads(line) for line in dix("logs", "--json").out.splitlines()]
    assert events[0] == {"event": "log", "time": "2026-01-01T00:00:10Z", "level": "info", "source": "rank-0", "message": "loaded"}


def test_following_a_log_takes_whole_new_lines_and_survives_rotation(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    offsets: dict[Path, int] = {}
    path.write_text('{"time": "1", "message": "a"}\n{"time": "2", "mess')
    assert [line.text for line in read_new(tmp_path, offsets)] == ["a"]
    path.write_text('{"time": "1", "message": "a"}\n{"time": "2", "message": "b"}\n')
    assert [line.text for line in read_new(tmp_path, offsets)] == ["b"]
    path.write_text('{"time": "3", "message": "c"}\n')
    assert [line.text for line in read_new(tmp_path, offsets)] == ["c"]


def test_lines_that_are_not_json_stay_behind_the_one_before() -> None:
    lines = list(parse_lines('{"time": "5", "level": "error", "message": "x"}\nTraceback: y\n', "rank-1"))
    assert [(line.time, line.text) for line in lines] == [("5", "x"), ("5", "Traceback: y")]


@pytest.mark.parametrize("line", ["data: {", 'data: {"error": {"message": "m", "code": "c"}}', "data: 3"])
def test_broken_events_end_the_stream(line: str) -> None:
    with pytest.raises(StreamError):
        StreamState().push(line)


def test_comments_and_other_lines_are_skipped() -> None:
    state = StreamState()
    assert [state.push(line) for line in (": keep-alive", "", "id: 3", "data: [DONE]")] == [None] * 4
    assert state.done


def test_a_server_truncates_and_an_offline_engine_does_not() -> None:
    from deepinfer_cli.commands.serve import SERVER_DEFAULTS

    serving_settings = prepare(Shared(), {}, SERVER_DEFAULTS).settings.engine
    assert (serving_settings.prefill_any_interval, serving_settings.yoco_mode, serving_settings.yoco_keep_tokens) == (2, "compact", 140)
    offline = prepare(Shared(), {}, {}).settings.engine
    assert (offline.prefill_any_interval, offline.yoco_mode, offline.yoco_keep_tokens) == (100, "off", 0)
    off = prepare(Shared(), {"engine.yoco_keep_tokens": 0, "hicache.size_gb": 0.0}, SERVER_DEFAULTS).settings
    assert off.engine.yoco_mode == "off"


def test_a_model_directory_gives_the_served_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    plan = plan_server(
        prepare(Shared(), {}, {"engine.yoco_mode": "compact", "engine.yoco_keep_tokens": 140}), str(tmp_path / "my-model"), None
    )
    assert (plan.name, plan.server.served_name, plan.engine.model) == ("my-model", "my-model", str(tmp_path / "my-model"))


def test_debug_faults_audit_every_page(tmp_path: Path) -> None:
    defaults = {"engine.yoco_mode": "compact", "engine.yoco_keep_tokens": 140}
    (tmp_path / "m").mkdir()
    plan = plan_server(prepare(Shared(), {"server.debug_faults": True}, defaults), str(tmp_path / "m"), None)
    assert plan.hicache.audit == "full"
    chosen = plan_server(prepare(Shared(), {"server.debug_faults": True, "hicache.audit": "off"}, defaults), str(tmp_path / "m"), None)
    assert chosen.hicache.audit == "off"


def test_the_model_variable_is_used_when_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "released").mkdir()
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path / "released"))
    plan = plan_server(prepare(Shared(), {}, {"engine.yoco_mode": "compact", "engine.yoco_keep_tokens": 140}), None, None)
    assert plan.name == "released"


def test_a_launch_is_told_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    call = prepare(Shared(), {}, {}, dict(os.environ))
    with Narrator(call, 2) as tell:
        tell({"event": "bound", "host": "127.0.0.1", "port": 8901})
        for rank in (0, 1):
            for share in range(11):
                tell({"event": "progress", "rank": rank, "stage": "weights", "fraction": share / 10})
            tell(
                {
                    "event": "rank_ready",
                    "rank": rank,
                    "elapsed_s": 2.0,
                    "limits": {"max_model_len": 32768, "num_blocks": 11, "block_size": 128},
                }
            )
        tell({"event": "ready", "url": "http://127.0.0.1:8901", "elapsed_s": 3.0})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "cache 1,280 tokens" in lines[1]


def test_an_answer_of_one_step_has_no_speed() -> None:
    """Three drafts that come at once are no 6,000 tokens a second."""
    usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
    short = Answer(content="", reasoning="", tokens=(), finish_reason="stop", usage=usage, ttft_s=0.02, total_s=0.0203)
    assert stats_line(short) == "TTFT 0.02 s · 3 tokens · 0 from prefix cache"
    longer = dataclasses.replace(short, usage={**usage, "completion_tokens": 101}, total_s=1.02, finish_reason="length")
    assert stats_line(longer) == "TTFT 0.02 s · 100.0 tok/s · 101 tokens · 0 from prefix cache · cut at --max-tokens"
