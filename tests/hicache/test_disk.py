"""The tables of the disk tier: what a file that goes takes along."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.disk import DiskStore, Slot
from hicache.disk_file import NO_PARENT, DiskLayout, Entry
from hicache.records import Kind

LAYOUT = DiskLayout(page_tokens=4, frame_bytes=4096, page_bytes=100, frames_per_state=3, proof=b"p" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore(tmp_path, LAYOUT, 2**30)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(20))
def test_oldest_file_takes_its_pages_their_descendants_and_the_states_of_both_along(store: DiskStore, seed: int) -> None:
    rng, entries = random.Random(seed), [Entry(Kind.PAGE, NO_PARENT, NO_PARENT, 0, 0, 0, 0)]
    for number in range(1, 60):  # every page goes on from an earlier one, or begins a prompt
        parent = rng.choice(entries)
        entries.append(Entry(Kind.PAGE, number.to_bytes(32, "little"), parent.key, parent.position + 4, 0, 0, 0))
        file = 1 + number // 15
        store._enter(Slot(file, 0, entries[-1]))
        store._sizes[file] = 1000
        if rng.random() < 0.3:
            page = rng.choice(entries[1:])
            store._enter(Slot(file, 0, Entry(Kind.STATE, page.key, page.parent, page.position, 0, 0, 0)))
    left = {key: slot.entry.parent for key, slot in store.pages.items() if slot.number > 2}
    while orphans := [key for key, parent in left.items() if parent != NO_PARENT and parent not in left]:
        for key in orphans:
            del left[key]
    states = {key for key, slot in store.states.items() if slot.number > 2 and key in left}
    store._shrink(store.budget_bytes - 2000)
    assert store._sizes.keys() == {3, 4}
    assert store.pages.keys() == left.keys()
    assert store.states.keys() == states


def test_file_that_a_kill_left_empty_goes_without_a_word_and_a_foreign_one_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DiskStore(tmp_path, LAYOUT, 2**30).close()
    empty, foreign = (tmp_path / f"{number:08}.pages" for number in (1, 2))
    empty.touch()
    refused = []
    for content in (b"", b"x" * 8192):
        foreign.write_bytes(content)
        store = DiskStore(tmp_path, LAYOUT, 2**30)
        refused.append(store.counters.errors["refused_file"])
        assert not empty.exists()
        assert not foreign.exists()
        store.close()
    assert refused == [0, 1]
    assert caplog.text.count("gives up") == 1
