"""Staging of rows and incremental block tables against their obvious twins."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.row_buffers import DeviceTables, StagedRows

CPU = torch.device("cpu")


def test_rows_arrive_and_padding_is_zero():
    staged = StagedRows(8, 3, CPU)
    address = staged.values.data_ptr()
    staged.upload(np.full((6, 3), 7, dtype=np.int32), 8)
    staged.upload(np.arange(6, dtype=np.int32).reshape(2, 3), 4)
    assert staged.values.tolist()[:4] == [[0, 1, 2], [3, 4, 5], [0, 0, 0], [0, 0, 0]]
    assert staged.values.data_ptr() == address


def test_unchanged_tables_send_nothing():
    tables, mine = DeviceTables(4, 8, CPU), [3, 4, 5]
    assert tables.update({1: mine}) == 3
    assert tables.update({1: mine}) == 0
    mine.append(9)
    assert tables.update({1: mine}) == 1
    assert tables.values[1, :4].tolist() == [3, 4, 5, 9]
    assert not tables.values[0].any()


def test_slot_of_another_sequence_is_sent_where_it_differs():
    tables = DeviceTables(4, 8, CPU)
    tables.update({1: [3, 4, 5]})
    assert tables.update({1: [3, 4, 6]}) == 1
    assert tables.update({1: [7, 4, 6]}) == 3
    assert tables.values[1, :3].tolist() == [7, 4, 6]


# A sequence in a slot grows, gives surplus blocks back and takes others, ends, and another one takes the slot.
STEP = st.tuples(st.integers(1, 3), st.sampled_from(["grow", "shrink", "replace", "keep"]), st.integers(1, 4))


@given(st.lists(STEP, min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_device_tables_equal_the_lists_after_any_history(steps):
    tables, lists, block = DeviceTables(4, 64, CPU), {slot: [] for slot in (1, 2, 3)}, 1
    for slot, action, count in steps:
        if action == "grow":
            lists[slot].extend(range(block, block + count))
            block += count
        elif action == "shrink":
            del lists[slot][max(0, len(lists[slot]) - min(count, 2)) :]
        elif action == "replace":
            lists[slot] = list(range(block, block + count))
            block += count
        lists[slot] = lists[slot][:60] if len(lists[slot]) > 60 else lists[slot]
        tables.update({s: table for s, table in lists.items() if table})
        for s, table in lists.items():
            assert tables.values[s, : len(table)].tolist() == table
