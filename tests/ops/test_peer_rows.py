"""Trips through the memory of peers: the definition between threads, and the kernels on one GPU whose streams are the ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.peer_rows import BRING_HOME, SEND_ROWS, PeerLayout, PeerMemory, bring_parts, bring_sums, send_rows
from tests.engine.simulation import run_ranks
from tests.parallel.peer_threads import ThreadPeers
from tests.parallel.peer_trips import Shape, Trip, add, check_home, draw_trips, terms


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 4),
    capacities=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=16),
    chosen=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    exact=st.booleans(),
    padded=st.booleans(),
)
def test_trips_bring_what_collectives_bring(ranks, capacities, counts, chosen, dtype, exact, padded):
    shape = Shape(ranks, chosen, 16, dtype, exact, padded, most_rows=5)

    def rank_main(world):
        peers = ThreadPeers(world.split(ranks, "cpu"), shape.layout)
        for trip in draw_trips(shape, capacities, counts):
            sent = send_rows(*trip.given(world.rank), peers.memory)
            trip.check_sent(world.rank, sent)
            parts = terms(sent.rows, sent.slots, sent.weights, world.rank)
            if exact:
                got = bring_parts(parts, sent, peers.memory)
            else:
                shared = trip.shared[world.rank]
                got = bring_sums(add(parts, dtype), sent, shared if len(shared) else None, peers.memory)
            check_home(got, trip.home(world.rank))
        peers.close()

    run_ranks(ranks, rank_main)


def test_arguments_that_break_the_contract_are_refused():
    layout = PeerLayout.of(1, 2, 16, 4, 2, False)
    own = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    memory = PeerMemory(0, (own.data_ptr(),), own, layout, 1.0)
    maps = torch.arange(3)[:, None], torch.ones(3, dtype=torch.int64)
    x, ids, weights = torch.ones(1, 16), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)
    for rows, capacity in ((x, 3), (x, 0), (torch.ones(1, 15), 1), (torch.ones(1, 32), 1)):
        with pytest.raises(ValueError, match="send_rows"):
            send_rows(rows, ids, weights, *maps, None, capacity, 3, memory)
    sent = send_rows(x, ids, weights, *maps, None, 2, 3, memory)
    with pytest.raises(ValueError, match="bring_home"):
        bring_sums(torch.ones(1, 16), sent, None, memory)
    with pytest.raises(ValueError, match="bring_home"):
        bring_sums(torch.ones(2, 16), sent, torch.ones(1, 16).bfloat16(), memory)


class StreamRanks:
    """Ranks of one process and one GPU, each a stream; they reach each other's memory as threads do."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.streams = [torch.cuda.Stream() for _ in range(shape.ranks)]
        boxes = [torch.zeros(shape.layout.num_bytes, dtype=torch.uint8, device="cuda") for _ in range(shape.ranks)]
        addresses = tuple(box.data_ptr() for box in boxes)
        self.memories = [PeerMemory(rank, addresses, box, shape.layout, 5.0) for rank, box in enumerate(boxes)]
        torch.cuda.synchronize()

    def each(self, action):
        """`action(rank)` in every stream. What waits on the device for others goes to all streams before anything else may: the host
        can wait for the device in between, as it does when a kernel is used for the first time."""
        results = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                results.append(action(rank))
        return results

    def home(self, rank: int, trip: Trip, sent) -> torch.Tensor | None:
        parts = terms(sent.rows, sent.slots, sent.weights, rank)
        if self.shape.exact:
            BRING_HOME(parts, sent, None, self.memories[rank])
            layout = self.shape.layout
            return self.memories[rank].section(layout.home, (len(trip.x[rank]), *parts.shape[1:]), torch.float32).clone()
        shared = trip.shared[rank]
        return BRING_HOME(add(parts, self.shape.dtype), sent, shared if len(shared) else None, self.memories[rank])


@pytest.fixture
def with_kernels():
    for op in (SEND_ROWS, BRING_HOME):
        op.use("cuda")
    yield
    for op in (SEND_ROWS, BRING_HOME):
        op.use("reference")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 5120), (torch.float32, 48)])
def test_kernels_of_several_streams_bring_what_collectives_bring(with_kernels, ranks, exact, dtype, columns):
    shape = Shape(ranks, 6 if ranks > 1 else 3, columns, dtype, exact, True, most_rows=64)
    group = StreamRanks(shape)
    for trip in draw_trips(shape, [1, 3, 64, 1, 17, 2], [0, 1, 5, 64, 2, 33, 64], "cuda"):
        torch.cuda.synchronize()
        sent = group.each(lambda rank, trip=trip: SEND_ROWS(*trip.given(rank), group.memories[rank]))
        got = group.each(lambda rank, trip=trip, sent=sent: group.home(rank, trip, sent[rank]))
        torch.cuda.synchronize()
        for rank in range(ranks):
            check_home(got[rank], trip.home(rank))


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True])
def test_recorded_trips_go_on_counting(with_kernels, exact):
    """A recording per rank of three trips with the rows of its inputs at the time of a replay, with eager trips in between."""
    shape = Shape(3, 6, 2048, torch.bfloat16, exact, False, most_rows=8)
    group = StreamRanks(shape)
    trips = list(draw_trips(shape, [8, 4, 1], [8, 1, 3, 0, 4], "cuda"))
    torch.cuda.synchronize()

    def whole(rank: int) -> list[torch.Tensor | None]:
        return [group.home(rank, trip, SEND_ROWS(*trip.given(rank), group.memories[rank])) for trip in trips]

    graphs, recorded = [], []
    for trip in trips:  # kernels are loaded before anything is recorded
        sent = group.each(lambda rank, trip=trip: SEND_ROWS(*trip.given(rank), group.memories[rank]))
        group.each(lambda rank, trip=trip, sent=sent: group.home(rank, trip, sent[rank]))
        torch.cuda.synchronize()
    for rank, stream in enumerate(group.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            recorded.append(whole(rank))
        graphs.append(graph)
    for _ in range(20):
        for trip in trips:
            for x in trip.x:
                x.mul_(-0.5)
        torch.cuda.synchronize()
        group.each(lambda rank: graphs[rank].replay())
        torch.cuda.synchronize()
        for number, trip in enumerate(trips):
            for rank in range(3):
                check_home(recorded[rank][number], trip.home(rank))
