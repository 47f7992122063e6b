"""Tensor collectives over gloo between real processes, their twin between threads, and peers that are lost in the middle."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from engine.parallel.tensor_group import SoloTensors
from tests.engine.simulation import run_ranks

PROLOGUE = """
import json, os, sys, time
from engine.process_env import prepare_process
prepare_process(1)
import torch
from engine.distributed import GlooGroup, GroupError
from tests.parallel.test_tensor_group import collect
rank, size, parts, where, timeout_s = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
world = GlooGroup(rank, size, init_file=where, timeout_s=timeout_s)
group = world.split(parts, "cpu")
"""


def start_ranks(body: str, size: int, parts: int, where: Path, timeout_s: float = 20.0) -> list[subprocess.Popen[str]]:
    code = PROLOGUE + textwrap.dedent(body)
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(size), str(parts), str(where), str(timeout_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def collect(group) -> list:
    """One call of everything, with results that depend on every rank's input."""
    rank, size = group.rank, group.size
    mine = torch.arange(3, dtype=torch.bfloat16) + 10 * rank
    gathered = torch.empty(size, 3, dtype=torch.bfloat16)
    group.all_gather(gathered, mine)
    given = torch.stack([torch.tensor([rank, peer]) for peer in range(size)])
    swapped = torch.empty_like(given)
    group.all_to_all(swapped, given)
    total = torch.tensor([rank + 1, 100])
    group.all_reduce(total)
    told = torch.tensor([float(rank)])
    group.broadcast(told, size - 1)
    right, left = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(2), torch.empty(2)
    sends = [(torch.tensor([rank, 1.0]), right), (torch.tensor([rank, 2.0]), right)]
    group.swap(sends, [(received[0], left), (received[1], left)])
    highest = group.max([rank, -rank])
    return [x.tolist() for x in (gathered.float(), swapped, total, told, *received)] + [highest]


def expected(rank: int, size: int) -> list:
    left = (rank - 1) % size
    return [
        [[float(10 * peer + i) for i in range(3)] for peer in range(size)],
        [[peer, rank] for peer in range(size)],
        [size * (size + 1) // 2, 100 * size],
        [float(size - 1)],
        [float(left), 1.0],
        [float(left), 2.0],
        [size - 1, 0],
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_threads_and_processes_move_the_same_data(tmp_path, size):
    assert run_ranks(size, lambda world: collect(world.split(size, "cpu"))) == [expected(rank, size) for rank in range(size)]
    # Closed before the interpreter ends: it would end threads of the library while they run.
    processes = start_ranks("print(json.dumps(collect(group)))\nworld.close()", size, size, tmp_path / "meet")
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert json.loads(out) == expected(rank, size)


def test_groups_of_consecutive_ranks_do_not_mix():
    parts = run_ranks(4, lambda world: (world.split(2, "cpu").rank, world.split(2, "cpu").max([world.rank])))
    assert parts == [(0, [1]), (1, [1]), (0, [3]), (1, [3])]


def test_a_group_of_one_copies():
    group, out = SoloTensors(), torch.empty(1, 2)
    group.all_gather(out, torch.tensor([1.0, 2.0]))
    assert out.tolist() == [[1.0, 2.0]]
    group.all_to_all(out, torch.tensor([[3.0, 4.0]]))
    assert out.tolist() == [[3.0, 4.0]]
    assert group.max([5]) == [5]


CALLS = {
    "all_gather": "group.all_gather(torch.empty(2, 4), torch.ones(4))",
    "all_to_all": "group.all_to_all(torch.empty(2, 4), torch.ones(2, 4))",
    "swap": "group.swap([(torch.ones(4), 1 - rank)], [(torch.empty(4), 1 - rank)])",
}


@pytest.mark.parametrize(
    ("call", "last_words"), [("all_gather", "os._exit(1)"), ("all_to_all", "time.sleep(20)"), ("swap", "time.sleep(20)")]
)
def test_a_lost_peer_is_a_clear_error_within_the_timeout(tmp_path, call, last_words):
    body = f"""
    if rank == 1:
        {CALLS[call]}
        {last_words}
    began = time.monotonic()
    try:
        while True:
            {CALLS[call]}
    except GroupError as error:
        print(json.dumps([time.monotonic() - began, str(error)]), flush=True)
        os._exit(3)
    """
    first, second = start_ranks(body, 2, 2, tmp_path / "meet", timeout_s=2.0)
    try:
        out, err = first.communicate(timeout=60)
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    assert first.returncode == 3, err
    waited_s, message = json.loads(out)
    assert waited_s < 8
    assert "rank 0 of 2 lost a peer" in message
