"""Linked lists in arrays against lists of Python."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache.recency import NONE, RecencyLists

ENTRIES, LISTS = 6, 4
steps = st.tuples(st.sampled_from(["push", "push_back", "unlink", "empty_into"]), st.integers(0, ENTRIES - 1), st.integers(0, LISTS - 1))


@given(st.lists(steps, max_size=40))
def test_lists_agree_with_plain_ones(actions: list[tuple[str, int, int]]) -> None:
    lists, plain = RecencyLists(ENTRIES, LISTS), [list[int]() for _ in range(LISTS)]
    for action, entry, number in actions:
        where = next((each for each in plain if entry in each), None)
        if action == "unlink":
            lists.unlink(entry)
            if where is not None:
                where.remove(entry)
        elif action == "empty_into":
            lists.empty_into(range(LISTS), number)
            plain[number] += [e for at, each in enumerate(plain) if at != number for e in each]
            plain = [each if at == number else [] for at, each in enumerate(plain)]
        elif where is None:
            getattr(lists, action)(number, entry)
            plain[number].insert(len(plain[number]) if action == "push" else 0, entry)
        assert [list(lists.oldest_first(n)) for n in range(LISTS)] == plain
        assert [list(lists.newest_first(n)) for n in range(LISTS)] == [each[::-1] for each in plain]
        assert [lists.oldest(n) for n in range(LISTS)] == [each[0] if each else NONE for each in plain]
        assert [lists.holds(e) for e in range(ENTRIES)] == [any(e in each for each in plain) for e in range(ENTRIES)]
        for step in (1, 2):
            filled = [n for n in range(1, LISTS, step) if plain[n]]
            assert lists.lowest(1, LISTS, step) == (filled[0] if filled else NONE)
