"""The verdict of the soak: a planted leak is found, restarts and odd samples are none, and a request without an end counts as lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.soak.bucket import CpuBucket
from tests.e2e.soak.figure import draw
from tests.e2e.soak.handles import calm
from tests.e2e.soak.load import Ended, _receive
from tests.e2e.soak.samples import HostSample, Sample, Table
from tests.e2e.soak.verdict import judge

HOUR_KIB = 1e6 / 1024  # one MB per hour, in KiB per hour


def sample(at_s: float, role: str, life: int, age_s: float, own_kib: float, fds: int = 20) -> Sample:
    own = int(own_kib)
    return Sample(at_s, role, life, 100 + life, age_s, own, own, own, own, threads=9, fds=fds, sockets=4, segments=1, cpu_s=1.0)


def write_run(
    out: Path,
    samples: list[Sample],
    outcomes: tuple[str, ...] = ("whole", "left", "error"),
    events: Sequence[dict[str, Any]] = ({"event": "kill", "elapsed_s": 1900}, {"event": "serves again", "elapsed_s": 1960}),
) -> None:
    out.mkdir(exist_ok=True)
    tables = (("samples.csv", Sample, samples), ("host.csv", HostSample, [HostSample(at, 2, 10, 5, 10) for at in range(40)]))
    for name, kind, rows in tables:
        table = Table(out / name, kind)
        for row in rows:
            table.add(row)
    requests = Table(out / "requests.csv", Ended)
    for outcome in outcomes:
        requests.add(Ended(1.0, 2.0, "chat", outcome, "because"))
    (out / "settings.json").write_text(json.dumps({"warm_s": 600}))
    (out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (out / "end.json").write_text(json.dumps({"minutes": 120, "cpu_share": 0.1, "leaks": [], "counters": {}}))


def lives(mb_per_hour: float, seed: int = 0, fds_every_s: float = 1e9) -> list[Sample]:
    """A rank killed half an hour after its start: each life begins small, warms up by 30 MB, and is noisy."""
    noise = random.Random(seed)
    found = []
    for at_s in range(0, 7200, 10):
        life, age_s = (1, at_s) if at_s < 1900 else (2, at_s - 1900)
        own = 200_000 + 30_000 * min(1.0, age_s / 500) + noise.uniform(-300, 300) + 20_000 * (noise.random() < 0.02)
        found.append(sample(at_s, "rank 0", life, age_s, own + mb_per_hour * HOUR_KIB * age_s / 3600, 20 + int(age_s / fds_every_s)))
    return found


def test_memory_that_only_warms_up_is_good_across_restarts_and_odd_samples(tmp_path: Path) -> None:
    write_run(tmp_path, lives(0.0))
    verdict = judge(tmp_path)
    assert verdict.complaints == []
    assert abs(verdict.roles[0].slope or 9) < 0.3
    assert verdict.roles[0].lives == 2


@pytest.mark.parametrize("mb_per_hour", [1.5, 20.0])
def test_a_planted_leak_is_found_at_its_rate(tmp_path: Path, mb_per_hour: float) -> None:
    write_run(tmp_path, lives(mb_per_hour))
    verdict = judge(tmp_path)
    assert verdict.roles[0].slope == pytest.approx(mb_per_hour, abs=0.3)
    assert len(verdict.complaints) == 1


def test_a_handle_that_is_lost_every_ten_minutes_is_found(tmp_path: Path) -> None:
    write_run(tmp_path, lives(0.0, fds_every_s=600))
    assert [complaint for complaint in judge(tmp_path).complaints if "fds grow" in complaint]


KILLS_S = tuple(range(250, 2900, 330))  # eight restarts in the first 40 % of two hours, back after a minute


def front(leaked: Callable[[float], int], seed: int = 0) -> list[Sample]:
    """A front under changing load: up to eight connections, one handle less while a rank restarts, nothing but dips and what is leaked."""
    noise, found = random.Random(seed), []
    for at_s in range(0, 7200, 10):
        restarting = any(kill_s <= at_s <= kill_s + 60 for kill_s in KILLS_S)
        connections = 0 if 3500 < at_s < 5800 else noise.choice((0, 1, 2, 5, 8)) if at_s < 6500 else noise.choice((5, 8))
        found.append(sample(at_s, "front", 1, at_s, 60_000, 29 - restarting + connections + leaked(at_s)))
    return found


def events_of_storm() -> list[dict[str, Any]]:
    kinds = (("kill", 0), ("serves again", 60))
    return [{"event": kind, "elapsed_s": kill_s + after_s} for kill_s in KILLS_S for kind, after_s in kinds]


@pytest.mark.parametrize("seed", range(5))
def test_floors_that_dip_while_ranks_restart_are_no_growth(tmp_path: Path, seed: int) -> None:
    write_run(tmp_path, front(lambda _at_s: 0, seed) + lives(0.0), events=events_of_storm())
    verdict = judge(tmp_path)
    assert verdict.complaints == []
    assert verdict.roles[0].handles["fds"][0] == 29


def test_a_disk_tier_that_opens_one_more_file_is_no_growth(tmp_path: Path) -> None:
    write_run(tmp_path, front(lambda at_s: int(at_s > 4000)) + lives(0.0), events=events_of_storm())
    assert judge(tmp_path).complaints == []


@pytest.mark.parametrize(
    ("name", "leaked"),
    [
        ("per restart", lambda at_s: sum(at_s > kill_s for kill_s in KILLS_S)),
        ("per hundred requests", lambda at_s: int(at_s * 900 / 7200) // 100),
    ],
)
def test_a_handle_lost_per_restart_or_per_hundred_requests_is_found(tmp_path: Path, name: str, leaked: Callable[[float], int]) -> None:
    write_run(tmp_path, front(leaked) + lives(0.0), events=events_of_storm())
    assert [complaint.split(" from")[0] for complaint in judge(tmp_path).complaints] == ["front: fds grow"], name


def test_samples_of_a_restart_and_of_the_minute_after_it_are_not_calm() -> None:
    seconds = np.array([0.0, 99.0, 100.0, 150.0, 200.0, 260.0, 261.0, 900.0, 901.0])
    assert calm(seconds, [(100.0, 200.0), (901.0, float("inf"))]).tolist() == [True, True, False, False, False, False, True, True, False]


@pytest.mark.parametrize("outcome", ["lost", "wrong"])
def test_a_request_that_is_lost_or_wrong_spoils_the_verdict(tmp_path: Path, outcome: str) -> None:
    write_run(tmp_path, lives(0.0), ("whole", outcome))
    assert judge(tmp_path).complaints == [f"request chat at 1.0 s is {outcome}: because"]


def test_a_run_that_is_not_over_is_not_good(tmp_path: Path) -> None:
    write_run(tmp_path, lives(0.0))
    (tmp_path / "end.json").unlink()
    assert judge(tmp_path).complaints == ["the run is not over"]


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path, lives(0.0))
    draw(tmp_path, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("status", "text", "ends"),
    [
        (200, 'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n', ("", "a")),
        (200, 'event: error\ndata: {"error": {"message": "rank 1 died"}}\n\n', ("rank 1 died", "")),
        (503, '{"error": {"message": "restarting"}}', ("503 restarting", "")),
        (200, 'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n', None),
        (200, 'event: error\ndata: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n', None),
        (400, '{"error": {"message": "bad"}}', None),
    ],
)
def test_an_end_is_an_answer_or_an_error_that_says_why(status: int, text: str, ends: tuple[str, str] | None) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(status, text=text))
    with httpx.Client(transport=transport, base_url="http://server") as client:
        if ends is not None:
            assert _receive(client, {"stream": True}, 0.0) == ends
            return
        with pytest.raises(ValueError):
            _receive(client, {"stream": True}, 0.0)


def test_load_waits_while_the_bucket_is_full_and_goes_on_as_it_drains() -> None:
    bucket = CpuBucket(share=0.1, burst_s=30.0)
    assert not bucket.update(cpu_s=30.0, now_s=10.0)
    assert bucket.update(cpu_s=45.0, now_s=60.0)  # 45 used, 6 drained
    assert not bucket.update(cpu_s=45.0, now_s=160.0)


def test_what_an_idle_server_uses_in_a_pause_is_no_debt() -> None:
    bucket = CpuBucket(share=0.1, burst_s=30.0)
    bucket.update(cpu_s=20.0, now_s=0.0)
    for second in range(1, 3601):
        assert not bucket.update(cpu_s=20.0 + 0.2 * second, now_s=float(second), paused=True)
    assert not bucket.update(cpu_s=20.0 + 0.2 * 3600 + 5.0, now_s=3601.0)


def test_a_quiet_hour_is_no_credit() -> None:
    bucket = CpuBucket(share=0.1, burst_s=30.0)
    bucket.update(cpu_s=1.0, now_s=3600.0)
    assert bucket.update(cpu_s=32.0, now_s=3600.0)
