"""Heart-beats between processes: ages, limits, and no torn reads."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from server.heartbeat import PROCESS_DEAD_S, HeartbeatFile


def tick_forever(path: Path) -> None:
    file = HeartbeatFile(path)
    while True:
        file.announce(0, 60.0)
        file.tick_process(0)


def test_a_reader_never_sees_a_stamp_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "beats"
    reader = HeartbeatFile(path, slots=1)
    reader.reset(0, 60.0)
    writer = multiprocessing.get_context("spawn").Process(target=tick_forever, args=(path,), daemon=True)
    writer.start()
    try:
        while reader.read(0).count == 0:
            assert writer.is_alive()
            time.sleep(0.01)
        complaints = {reader.read(0).complaint for _ in range(100_000)}
    finally:
        writer.kill()
        writer.join()
    assert complaints == {""}


def test_slots_do_not_touch_each_other(tmp_path: Path) -> None:
    file = HeartbeatFile(tmp_path / "beats", slots=3)
    for rank in range(3):
        file.reset(rank, 10.0 * (rank + 1))
    file.tick_loop(1)
    assert [file.read(rank).count for rank in range(3)] == [0, 1, 0]
    assert [file.read(rank).limit_s for rank in range(3)] == [10.0, 20.0, 30.0]


@pytest.mark.parametrize(("advance_s", "limit_s", "words"), [(PROCESS_DEAD_S + 1, 1e9, "process"), (5.0, 4.0, "step loop"), (5.0, 6.0, "")])
def test_stale_stamps_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advance_s: float, limit_s: float, words: str) -> None:
    file = HeartbeatFile(tmp_path / "beats", slots=1)
    file.reset(0, limit_s)
    now = time.monotonic()
    monkeypatch.setattr("server.heartbeat.time.monotonic", lambda: now + advance_s)
    complaint = file.read(0).complaint
    assert words in complaint
    assert bool(complaint) == bool(words)
