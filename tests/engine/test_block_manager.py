from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_manager import Admit, BlockManager, RefPool
from tests.engine.simulation import make_sequence


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, pin and free against a model that is a list and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = RefPool(8, "blocks")
        self.free = list(range(1, 8))
        self.refs: Counter[int] = Counter()

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        answer = self.pool.admit(count)
        if count >= 8:
            assert answer is Admit.NEVER
        elif count > len(self.free):
            assert answer is Admit.LATER
        else:
            assert answer is Admit.OK
            taken = self.pool.allocate(count)
            assert taken == self.free[:count]  # first in, first out
            del self.free[:count]
            self.refs.update(taken)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.pin(item)
        self.refs[item] += 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.free(item)
        self.refs[item] -= 1
        if not self.refs[item]:
            del self.refs[item]
            self.free.append(item)

    @invariant()
    def counts_add_up(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == len(self.refs)
        assert all(self.pool.refs(item) == self.refs[item] for item in range(8))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_pool_agrees_with_a_model = PoolMachine.TestCase


def test_freeing_what_nobody_owns_raises():
    pool = RefPool(4, "blocks")
    [block] = pool.allocate()
    pool.free(block)
    for item in (block, 0, 4, -1):
        with pytest.raises(AssertionError, match="free of blocks"):
            pool.free(item)
    with pytest.raises(AssertionError, match="pin of blocks"):
        pool.pin(block)


def test_usage_counts_the_reserved_block():
    pool = RefPool(10, "blocks")
    assert pool.usage == 0.1
    pool.allocate(9)
    assert pool.usage == 1.0


def test_a_table_is_freed_last_block_first():
    pool = RefPool(5, "blocks")
    table = pool.allocate(4)
    pool.free_all(table)
    assert pool.allocate(4) == [4, 3, 2, 1]


def test_admission_asks_for_the_whole_prompt_and_a_state_slot():
    blocks = BlockManager(num_blocks=4, num_state_slots=2, block_size=4)
    assert blocks.admit(12) is Admit.OK
    assert blocks.admit(13) is Admit.NEVER
    first = make_sequence("first", 5)
    blocks.allocate(first, 5)
    assert len(first.block_table) == 2
    assert blocks.admit(4) is Admit.LATER  # a block is free, a state slot is not
    blocks.release(first)
    blocks.release(first)  # harmless
    assert (first.block_table, first.state_slot) == ([], -1)
    assert blocks.admit(12) is Admit.OK


def test_allocating_twice_for_one_sequence_raises():
    blocks = BlockManager(4, 3, 4)
    seq = make_sequence("one", 4)
    blocks.allocate(seq, 4)
    with pytest.raises(AssertionError, match="owns blocks"):
        blocks.allocate(seq, 4)
