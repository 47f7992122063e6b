"""Which silent step loops are hung: those that do nothing although nobody keeps them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.heartbeat import STILL_BEATS, HeartbeatFile, start_process_thread
from server.stillness import WORKING_S, LoopWatch, descendants, others_want_to_run


class Machine:
    """What a watch sees."""

    def __init__(self) -> None:
        self.used_s, self.wants, self.waits = 0.0, False, False
        self.watch = LoopWatch(lambda: self.used_s, lambda: self.wants)


def test_a_loop_that_does_nothing_is_still_from_the_second_look_on() -> None:
    machine = Machine()
    machine.watch.arm(lambda: False)
    assert [machine.watch.look(5) for _ in range(4)] == [0, 1, 2, 3]
    assert machine.watch.look(6) == 0


def test_before_the_loop_begins_and_after_it_ends_nothing_is_still() -> None:
    machine = Machine()
    assert [machine.watch.look(0) for _ in range(3)] == [0, 0, 0]
    machine.watch.arm(lambda: False)
    assert machine.watch.look(0) == 1
    machine.watch.disarm()
    assert machine.watch.look(0) == 0


@given(st.lists(st.sampled_from(["ticks", "computes", "lacks a processor", "waits for peers", "nothing"]), max_size=40))
def test_only_looks_in_a_row_with_nothing_count(happens: list[str]) -> None:
    machine = Machine()
    machine.watch.arm(lambda: machine.waits)
    count, row = 0, 0
    machine.watch.look(count)
    for what in happens:
        count += what == "ticks"
        machine.used_s += 2 * WORKING_S if what == "computes" else 0.0
        machine.wants, machine.waits = what == "lacks a processor", what == "waits for peers"
        row = row + 1 if what == "nothing" else 0
        assert machine.watch.look(count) == row


def test_the_thread_that_beats_tells_of_a_loop_that_stands_still(tmp_path: Path) -> None:
    beats = HeartbeatFile(tmp_path / "beats", slots=1)
    beats.reset(0, 600.0)
    machine = Machine()
    machine.watch.arm(lambda: False)
    start_process_thread(beats, 0, interval_s=0.001, look=machine.watch.look)
    while not beats.read(0).complaint:
        time.sleep(0.001)
    assert "computes nothing" in beats.read(0).complaint
    assert beats.read(0).still >= STILL_BEATS
    machine.wants = True
    while beats.read(0).still:
        time.sleep(0.001)
    assert beats.read(0).complaint == ""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that only waits, which has started one that computes."""
    inner = "print(flush=True)\nwhile True: pass"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}], stdout=sys.stdout)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    for pid in descendants(process.pid):
        subprocess.run(["kill", "-9", str(pid)], check=True)
    process.kill()
    process.wait()


def test_a_compiler_that_runs_for_this_process_is_work(child: subprocess.Popen[bytes]) -> None:
    assert len(descendants(child.pid)) == 1
    assert others_want_to_run()


def test_the_thread_that_looks_does_not_see_itself() -> None:
    """Run apart: threads of this process may compute meanwhile."""
    code = "from server.stillness import others_want_to_run\nprint([others_want_to_run() for _ in range(50)].count(True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0
