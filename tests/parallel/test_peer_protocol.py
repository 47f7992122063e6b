"""The protocol of csrc/kernels/peer_rows.cu in every order of its steps: nobody reads what is of another trip or waits for ever.

Each block of each rank is a list of steps; blocks of a rank meet only where a kernel ends. A cell of memory holds the trip of its content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

Step = tuple[Any, ...]
Cell = tuple[Any, ...]


def kernel(rank: int, block: int, ranks: int, blocks: int, sends: bool, fault: str) -> Iterator[Step]:
    """`send_rows` or `bring_home` of one block: what it reads and writes of its own rank's memory and of others'."""
    data, flags = ("rows", "came") if sends else ("results", "returned")
    yield "begin", ("trip", rank), int(sends)
    if fault == "early count" and sends and block == 0:
        yield "write", ("trip", rank)
    writes = [("write", (data, peer, rank, block)) for peer in range(ranks)]
    tells = [("write", (flags, peer, rank, block)) for peer in range(ranks)]
    yield from [*tells, *writes] if fault == "flags first" else [*writes, *tells]
    if fault != f"no wait for {data}":
        for peer in range(ranks):
            yield "wait", [(flags, rank, peer, number) for number in range(blocks)]
    if sends and block == 0:
        yield "write", ("trip", rank)
    for peer in range(ranks):
        yield "read", (data, rank, peer, (block + 1) % blocks)


def program(rank: int, block: int, ranks: int, blocks: int, trips: int, fault: str) -> list[Step]:
    steps: list[Step] = []
    for _ in range(trips):
        steps += kernel(rank, block, ranks, blocks, True, fault)
        steps.append(("end",))
        if block == 0:  # the experts, the last who look at the rows
            steps += [("read", ("rows", rank, peer, number)) for peer in range(ranks) for number in range(blocks)]
        steps.append(("end",))
        steps += kernel(rank, block, ranks, blocks, False, fault)
        steps.append(("end",))
    return steps


class Wrong(Exception):
    pass


def explore(ranks: int, blocks: int, trips: int, fault: str = "") -> int:
    """Visit every state that some order of steps leads to. Returns their number. Raises Wrong."""
    owners = [(rank, block) for rank in range(ranks) for block in range(blocks)]
    programs = [program(rank, block, ranks, blocks, trips, fault) for rank, block in owners]
    ends = [[place for place, step in enumerate(steps) if step[0] == "end"] for steps in programs]
    start = tuple((0, 0) for _ in owners), frozenset()
    seen, todo = {start}, [start]
    while todo:
        threads, cells = todo.pop()
        stuck = True
        for number, (place, trip) in enumerate(threads):
            if place == len(programs[number]):
                continue
            step = programs[number][place]
            memory = dict(cells)
            if step[0] == "end":
                # A kernel begins when all blocks of the one before have ended.
                turn = ends[number].index(place)
                if any(ends[n][turn] > threads[n][0] for n, (rank, _) in enumerate(owners) if rank == owners[number][0]):
                    continue
            elif step[0] == "begin":
                trip = memory.get(step[1], 0) + step[2]
            elif step[0] == "write":
                memory[step[1]] = trip
            elif step[0] == "wait":
                if any(memory.get(cell, 0) < trip for cell in step[1]):
                    continue
            elif memory.get(step[1], 0) != trip:
                raise Wrong(f"rank {owners[number][0]} reads {step[1]} of trip {memory.get(step[1], 0)} in trip {trip}")
            stuck = False
            state = (*threads[:number], (place + 1, trip), *threads[number + 1 :]), frozenset(memory.items())
            if state not in seen:
                seen.add(state)
                todo.append(state)
        if stuck and any(place < len(steps) for (place, _), steps in zip(threads, programs, strict=True)):
            raise Wrong(f"everybody waits: {threads}")
    return len(seen)


@pytest.mark.parametrize(("ranks", "blocks", "trips"), [(1, 2, 3), (2, 1, 3)])
def test_no_order_of_steps_is_wrong(ranks, blocks, trips):
    assert explore(ranks, blocks, trips) > 100


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "blocks", "trips"), [(3, 1, 2), (2, 2, 2)])
def test_no_order_of_more_steps_is_wrong(ranks, blocks, trips):
    assert explore(ranks, blocks, trips) > 10_000


@pytest.mark.parametrize("fault", ["no wait for rows", "no wait for results", "flags first"])
def test_without_one_of_its_rules_some_order_is_wrong(fault):
    with pytest.raises(Wrong, match="reads"):
        explore(2, 1, 3, fault)


def test_a_trip_that_is_counted_before_all_blocks_have_met_is_another_one_for_some():
    with pytest.raises(Wrong):
        explore(1, 2, 2, "early count")
