"""Several lists of entries, each in order of last use, linked in int arrays: moving an entry is O(1) and allocates nothing."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable, Iterator

NONE = -1


class RecencyLists:
    """Entries 0..num_entries-1, each in at most one of `num_lists` lists.

    List n is a ring through its head, entry `num_entries + n`: `next[head]` is the least recent entry, `prev[head]` the most recent one.
    stamp: of an entry, the clock at its last use, in ticks; its users write it.
    """

    def __init__(self, num_entries: int, num_lists: int) -> None:
        size = num_entries + num_lists
        self.first_head = num_entries
        self.prev, self.next = array("i", [NONE]) * size, array("i", [NONE]) * size
        for head in range(num_entries, size):
            self.prev[head] = self.next[head] = head
        self.clock = 0
        self.stamp = array("q", [0]) * num_entries
        self._used: list[int] = []  # lists that ever held an entry, ascending: few, whatever the number of lists

    @property
    def num_bytes(self) -> int:
        return 2 * self.prev.itemsize * len(self.prev) + self.stamp.itemsize * len(self.stamp)

    def tick(self) -> int:
        """Something is used now. Returns the clock."""
        self.clock += 1
        return self.clock

    def head(self, number: int) -> int:
        """The head of a list into which entries are about to be linked."""
        if number not in self._used:
            insort(self._used, number)
        return self.first_head + number

    def clear(self, entry: int) -> None:
        """The entry is a new one: its links are those of a former one and lead nowhere."""
        self.prev[entry] = self.next[entry] = NONE

    def holds(self, entry: int) -> bool:
        """Whether an entry is in a list."""
        return self.prev[entry] != NONE

    def push(self, number: int, entry: int) -> None:
        """An entry that is in no list becomes the most recent one of list `number`."""
        head = self.head(number)
        last = self.prev[head]
        self.next[last] = entry
        self.prev[entry], self.next[entry] = last, head
        self.prev[head] = entry

    def push_back(self, number: int, entry: int) -> None:
        """An entry that is in no list becomes the least recent one of list `number`."""
        head = self.head(number)
        first = self.next[head]
        self.prev[first] = entry
        self.prev[entry], self.next[entry] = head, first
        self.next[head] = entry

    def unlink(self, entry: int) -> None:
        """Take an entry out of its list, if it is in one."""
        before, after = self.prev[entry], self.next[entry]
        if before == NONE:
            return
        self.next[before], self.prev[after] = after, before
        self.clear(entry)

    def oldest(self, number: int) -> int:
        """The least recent entry of a list, or -1."""
        head = self.first_head + number
        entry = self.next[head]
        return NONE if entry == head else entry

    def lowest(self, begin: int, end: int, step: int = 1) -> int:
        """The first list of begin, begin + step, ... before `end` that holds an entry, or -1."""
        succ, first_head = self.next, self.first_head
        for number in self._used:
            if begin <= number < end and (number - begin) % step == 0 and succ[first_head + number] != first_head + number:
                return number
        return NONE

    def empty_into(self, numbers: Iterable[int], target: int) -> None:
        """Put whole lists behind the most recent entry of `target`, one after the other. O(lists)."""
        head = self.head(target)
        for number in numbers:
            other = self.first_head + number
            first, last = self.next[other], self.prev[other]
            if other in (head, first):
                continue
            end = self.prev[head]
            self.next[end], self.prev[first] = first, end
            self.next[last], self.prev[head] = head, last
            self.prev[other] = self.next[other] = other

    def oldest_first(self, number: int) -> Iterator[int]:
        head = self.first_head + number
        entry = self.next[head]
        while entry != head:
            yield entry
            entry = self.next[entry]

    def newest_first(self, number: int) -> Iterator[int]:
        head = self.first_head + number
        entry = self.prev[head]
        while entry != head:
            yield entry
            entry = self.prev[entry]

    def used(self, begin: int, end: int) -> list[int]:
        """Lists in [begin, end) that ever held an entry, ascending."""
        return [number for number in self._used if begin <= number < end]
