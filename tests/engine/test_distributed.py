"""Real processes over gloo: agreement, a dead peer, a hung one, one that never comes."""

import json
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from engine.distributed import PeerWaits, SoloGroup

PROLOGUE = """
import json, os, sys, time
from engine.process_env import prepare_process
prepare_process(1)
from engine.distributed import GlooGroup, GroupError
rank, size, where, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
place = {"port": int(where)} if where.isdigit() else {"init_file": where}
group = GlooGroup(rank, size, timeout_s=timeout_s, **place)
"""


def start_ranks(
    body: str, size: int, where: Path | int, timeout_s: float = 20.0, ranks: list[int] | None = None
) -> list[subprocess.Popen[str]]:
    code = PROLOGUE + textwrap.dedent(body)
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(size), str(where), str(timeout_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (range(size) if ranks is None else ranks)
    ]


def outcomes(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit status, output, errors) of every rank; none is left behind."""
    try:
        results = []
        for process in processes:
            out, err = process.communicate(timeout=60)
            results.append((process.returncode, out, err))
        return results
    finally:
        for process in processes:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_rank_waits_for_peers_until_the_last_of_its_threads_does_not():
    waits = PeerWaits()
    assert not waits.now
    with waits:
        with pytest.raises(ValueError, match="lost"), waits:
            raise ValueError("lost")
        assert waits.now
    assert not waits.now


def test_a_group_of_one_agrees_with_itself():
    assert SoloGroup().max([3, 0]) == [3, 0]


@pytest.mark.parametrize("by_port", [False, True], ids=["file", "port"])
def test_ranks_get_the_element_wise_maximum(tmp_path, by_port):
    body = """
    print(json.dumps([group.max([rank, -rank, 2**60 * rank]), group.max([5 - rank])]))
    group.close()
    group.close()
    """
    for status, out, err in outcomes(start_ranks(body, 2, _free_port() if by_port else tmp_path / "meet")):
        assert status == 0, err
        assert json.loads(out) == [[1, 0, 2**60], [5]]


@pytest.mark.parametrize(("last_words", "limit_s"), [("os._exit(1)", 5.0), ("time.sleep(20)", 8.0)], ids=["dead", "hung"])
def test_a_lost_peer_is_a_clear_error_within_the_timeout(tmp_path, last_words, limit_s):
    body = f"""
    if rank == 1:
        group.max([0])
        {last_words}
    began = time.monotonic()
    try:
        while True:
            group.max([1])
    except GroupError as error:
        print(json.dumps([time.monotonic() - began, str(error), error.hint]), flush=True)
        os._exit(3)
    """
    processes = start_ranks(body, 2, tmp_path / "meet", timeout_s=3.0)
    out, err = processes[0].communicate(timeout=60)
    outcomes_of_peer = processes[1]
    outcomes_of_peer.kill()
    outcomes_of_peer.communicate()
    assert processes[0].returncode == 3, err
    waited_s, message, hint = json.loads(out)
    assert waited_s < limit_s
    assert "rank 0 of 2 lost a peer" in message
    assert "restart the group" in hint


def test_a_peer_that_never_comes_is_a_clear_error(tmp_path):
    began = time.monotonic()
    [(status, _, err)] = outcomes(start_ranks("", 2, tmp_path / "meet", timeout_s=1.0, ranks=[0]))
    assert status == 1
    assert "rank 0 of 2 could not join its group" in err
    assert time.monotonic() - began < 30
