"""Shared experts against the same experts on one rank: every route, every combination of rows, both ways of adding up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.exchange_rows import pack_rows
from engine.ops.expert_mlp import expert_mlp, expert_parts
from engine.ops.peer_rows import PeerLayout
from engine.parallel.expert_exchange import ExpertExchange, Route
from engine.parallel.placement import Placement
from tests.engine.simulation import run_ranks
from tests.parallel.peer_threads import ThreadPeers

E, K, C, INNER, LAYERS, BOUNDARY = 6, 2, 8, 16, 2, 1


class Weights:
    """All experts of one layer, the shared one last; a rank's share as the exchange wants it."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.w13 = torch.randn(E + 1, 2 * INNER, C, generator=draw).to(dtype)
        self.w2 = torch.randn(E + 1, C, INNER, generator=draw).to(dtype)

    def share(self, placement: Placement, rank: int) -> "Share":
        held = [*placement.held_by(rank), E]
        return Share(self.w13[held].clone(), self.w2[held].clone())

    def all_here(self, x, ids, weights):
        ids = torch.nn.functional.pad(ids, (0, 1), value=E)
        parts = terms(x, ids, torch.nn.functional.pad(weights, (0, 1), value=1.0), self.w13, self.w2)
        return parts.float().sum(1).to(x.dtype)


def terms(x, slots, weights, w13, w2):
    """As `expert_parts`, one choice at a time, so that the bits of a result cannot depend on what else there is."""
    out = torch.zeros(*slots.shape, C, dtype=x.dtype)
    for row, choice in (slots >= 0).nonzero().tolist():
        one = slots[row, choice].view(1, 1), weights[row, choice].view(1, 1)
        out[row, choice] = expert_parts(x[row : row + 1], *one, w13, w2, 10.0, False)[0, 0]
    return out


class Share:
    def __init__(self, w13, w2):
        self.w13, self.w2, self.stores = w13, w2, [w13, w2]

    def parts(self, x, slots, weights):
        return terms(x, slots, weights, self.w13, self.w2)

    def summed(self, x, slots, weights):
        return expert_mlp(x, slots, weights, self.w13, self.w2, 10.0, False)

    def shared(self, x):
        slots = torch.full((len(x), 1), len(self.w13) - 1)
        return terms(x, slots, torch.ones(len(x), 1), self.w13, self.w2)[:, 0]

    def add_up(self, parts, shared):
        return torch.cat((parts, shared[:, None]), 1).float().sum(1).to(shared.dtype)


def make_exchange(world, size, placement, *, exact=True, route=Route.GATHER, dtype=torch.float32, peer_rows=4):
    """peer_rows: steps with more rows of a rank go by collectives."""
    group = world.split(size, "cpu")
    options = {"exact": exact, "route": route, "device": "cpu", "hidden": C, "dtype": dtype, "num_chosen": K}
    if route is Route.PEERS:
        options["peers"] = ThreadPeers(group, PeerLayout.of(size, peer_rows, C, dtype.itemsize, K, exact))
    return ExpertExchange(group, placement, LAYERS, BOUNDARY, **options)


def rows_of(rank: int, count: int, seed: int, dtype=torch.float32):
    draw = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(count, C, generator=draw).to(dtype)
    ids = torch.stack([torch.randperm(E, generator=draw)[:K] for _ in range(count)]) if count else torch.empty(0, K, dtype=torch.int64)
    return x, ids, torch.rand(count, K, generator=draw)


@settings(max_examples=25, deadline=None)
@given(
    size=st.sampled_from([2, 4]),
    extra=st.integers(0, 5),
    counts=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    kept=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    route=st.sampled_from(list(Route)),
    exact=st.booleans(),
    seed=st.integers(0, 100),
)
def test_every_rank_gets_what_all_experts_in_one_place_give(size, extra, counts, kept, route, exact, seed):
    layers = [Weights(seed + layer) for layer in range(LAYERS)]
    placement = Placement.initial(E, extra, size)

    def rank_main(world):
        exchange = make_exchange(world, size, placement, exact=exact, route=route)
        for number, weights in enumerate(layers):
            exchange.attach(number, weights.share(placement, world.rank))
        count = counts[world.rank]
        decoder = min(kept[world.rank], count)
        exchange.begin(count, decoder)
        for number, rows in enumerate((count, decoder)):
            if rows == 0:  # such a rank has left its model already, as one whose prompt rows were all dropped
                break
            x, ids, shares = rows_of(world.rank, rows, seed + number)
            expected = layers[number].all_here(x, ids, shares)
            got = exchange.run(number, x, ids, shares)
            if exact:
                assert torch.equal(got, expected)
            else:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
        exchange.finish()
        exchange.close()

    run_ranks(size, rank_main)


@pytest.mark.parametrize("route", Route)
def test_bf16_rows_travel_too(route):
    weights, placement = Weights(3, torch.bfloat16), Placement.initial(E, 0, 2)

    def rank_main(world):
        exchange = make_exchange(world, 2, placement, route=route, dtype=torch.bfloat16)
        for number in range(LAYERS):
            exchange.attach(number, weights.share(placement, world.rank))
        x, ids, shares = rows_of(world.rank, 1 + world.rank, 1, torch.bfloat16)
        exchange.begin(len(x), 0)
        got = exchange.run(0, x, ids, shares)
        exchange.finish()
        assert torch.equal(got, weights.all_here(x, ids, shares))

    run_ranks(2, rank_main)


def test_copies_of_an_expert_take_turns():
    placement = Placement((0, 1, 0, 0), 2, 2)

    def rank_main(world):
        layer = make_exchange(world, 2, placement).layers[0]
        ids, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        return pack_rows(torch.zeros(4, C), ids, weights, layer.slots, layer.copies, None, world.rank, 4)[:, C].tolist()

    assert run_ranks(2, rank_main) == [[0, 2, 3, 0], [2, 3, 0, 2]]


def test_tokens_are_counted_by_local_slot():
    weights, placement = Weights(1), Placement.initial(E, 0, 2)

    def rank_main(world):
        exchange = make_exchange(world, 2, placement)
        exchange.counting = True
        for number in range(LAYERS):
            exchange.attach(number, weights.share(placement, world.rank))
        exchange.begin(2, 0)
        exchange.run(0, torch.randn(2, C), torch.tensor([[0, 4], [0, 5]]), torch.ones(2, K))
        exchange.finish()
        return exchange.layers[0].counts.tolist()

    assert run_ranks(2, rank_main) == [[4, 0, 0], [0, 2, 2]]


def test_a_layer_out_of_turn_is_refused():
    exchange = run_ranks(1, lambda world: make_exchange(world, 1, Placement.initial(E, 0, 1)))[0]
    with pytest.raises(AssertionError, match="layer 0 instead of 2"):
        exchange.run(0, torch.randn(1, C), torch.tensor([[0, 1]]), torch.ones(1, K))
