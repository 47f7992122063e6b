"""Trips through the memory of peers by the kernels themselves: ranks are threads that each emulate a GPU and share memory, so that waits,
flags and writes to others interleave as the machine likes."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.cuda.library import HomeArguments, PeerArguments, SendArguments
from engine.ops.cuda.peer_rows import run_home, run_send
from engine.ops.peer_rows import MOST_BLOCKS, SEND_ROWS, PeerLayout, PeerMemory
from tests.csrc.emulated import emulated_library
from tests.engine.simulation import run_ranks
from tests.parallel.peer_threads import ThreadPeers
from tests.parallel.peer_trips import SLOTS, Shape, add, check_home, draw_trips, terms

THREADS = 32  # of a block, so that there are several


@pytest.fixture(scope="module", autouse=True)
def built():
    """Their own library, which is quick to build; before there are threads."""
    library = emulated_library("peer_rows_emulated", ("kernels/peer_rows.cu",))
    return SimpleNamespace(send_rows=library.dix_send_rows, bring_home=library.dix_bring_home)


@settings(max_examples=12, deadline=None)
@given(
    ranks=st.integers(1, 4),
    capacities=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=16),
    chosen=st.integers(1, 3),
    columns=st.sampled_from([8, 16, 1048]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    exact=st.booleans(),
    padded=st.booleans(),
)
def test_trips_bring_what_collectives_bring(built, ranks, capacities, counts, chosen, columns, dtype, exact, padded):
    """Many trips in one memory, of other sizes each: a row, a result or a flag that is overwritten too early or lost changes one."""
    shape = Shape(ranks, chosen, columns, dtype, exact, padded, most_rows=5)

    def rank_main(world):
        group = world.split(ranks, "cpu")
        peers = ThreadPeers(group, shape.layout)
        memory = peers.memory
        for trip in draw_trips(shape, capacities, counts):
            sent = run_send(built, 0, *trip.given(world.rank), memory, THREADS)
            trip.check_sent(world.rank, sent)
            parts = terms(sent.rows, sent.slots, sent.weights, world.rank)
            if exact:
                run_home(built, 0, parts, sent, None, memory, THREADS)
                got = memory.section(memory.layout.home, (len(trip.x[world.rank]), chosen, columns), torch.float32)
            else:
                shared = trip.shared[world.rank]
                got = run_home(built, 0, add(parts, dtype), sent, shared if len(shared) else None, memory, THREADS)
            check_home(got, trip.home(world.rank))
        peers.close()

    run_ranks(ranks, rank_main)


def test_a_rank_that_is_ahead_overwrites_nothing(built):
    """Rank 1 looks at what it got only when rank 0 has gone as far as it can without it: into its second kernel, behind its results."""

    def rank_main(world):
        group = world.split(2, "cpu")
        memory = ThreadPeers(group, PeerLayout.of(2, 1, 8, 4, 1, False)).memory
        maps = torch.arange(2 * SLOTS)[:, None], torch.ones(2 * SLOTS, dtype=torch.int64)
        came = memory.section(memory.layout.returned, (2, MOST_BLOCKS), torch.int64)
        for trip in range(6):
            x = torch.full((1, 8), float(10 * trip + world.rank))
            ids = torch.tensor([[SLOTS * (1 - world.rank)]])  # an expert of the other rank
            sent = run_send(built, 0, x, ids, torch.ones(1, 1), *maps, None, 1, SLOTS, memory, THREADS)
            while world.rank == 1 and int(came[0, 0]) < trip + 1:
                pass
            assert sent.rows[1 - world.rank].tolist() == [10.0 * trip + (1 - world.rank)] * 8
            total = run_home(built, 0, sent.rows.clone(), sent, torch.zeros(1, 8), memory, THREADS)
            assert total.tolist() == x.tolist()
        group.max([0])

    run_ranks(2, rank_main)


def test_a_kernel_gives_up_on_a_peer_that_does_not_come(built):
    layout = PeerLayout.of(2, 1, 8, 4, 1, False)
    boxes = [torch.zeros(layout.num_bytes, dtype=torch.uint8) for _ in range(2)]
    memory = PeerMemory(0, tuple(box.data_ptr() for box in boxes), boxes[0], layout, 0.05)
    arguments = torch.ones(1, 8), torch.tensor([[1]]), torch.ones(1, 1), torch.arange(2)[:, None], torch.ones(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="send_rows: CUDA error 719"):
        run_send(built, 0, *arguments, None, 1, 1, memory, THREADS)
    with pytest.raises(RuntimeError, match=r"rank 0 waited 0\.05 s for a peer in trip 1"):
        SEND_ROWS.reference(*arguments, None, 1, 1, memory)


@pytest.mark.parametrize(("structure", "size"), [(PeerArguments, 112), (SendArguments, 216), (HomeArguments, 176)])
def test_structures_have_the_sizes_of_the_sources(structure, size):
    assert ctypes.sizeof(structure) == size
