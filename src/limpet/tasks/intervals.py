"""Sets of task numbers as intervals, so that 100,000 tasks take little memory and few bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

Interval = tuple[int, int]
"""The numbers from the first up to, but without, the second."""


class IntervalSet:
    """A set of ints, stored as sorted disjoint intervals. ``add`` and ``in`` take O(log n) steps.

    Workers complete tasks roughly in order, so that the number of intervals is about that of the
    workers.
    """

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            self._starts.append(start)
            self._stops.append(stop)
        self._length = sum(self._stops) - sum(self._starts)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, number: int) -> bool:
        i = bisect_right(self._starts, number) - 1
        return i >= 0 and number < self._stops[i]

    def __iter__(self) -> Iterator[Interval]:
        """Yield the intervals in order, none of which touches the next one."""
        return zip(self._starts, self._stops)

    def add(self, number: int) -> None:
        """Add a number that is not in the set."""
        i = bisect_right(self._starts, number)
        joins_left = i > 0 and self._stops[i - 1] == number
        joins_right = i < len(self._starts) and self._starts[i] == number + 1
        if joins_left and joins_right:
            self._stops[i - 1] = self._stops.pop(i)
            del self._starts[i]
        elif joins_left:
            self._stops[i - 1] = number + 1
        elif joins_right:
            self._starts[i] = number
        else:
            self._starts.insert(i, number)
            self._stops.insert(i, number + 1)
        self._length += 1

    def gaps(self, stop: int) -> Iterator[Interval]:
        """Yield the intervals of the numbers below ``stop`` that are not in the set."""
        start = 0
        for taken, end in self:
            if start < taken:
                yield start, taken
            start = end
        if start < stop:
            yield start, stop


class OpenNumbers:
    """The numbers of the tasks that nobody has leased, lowest first."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._heap = list(intervals)
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def pop(self) -> int:
        """Remove and return the lowest number."""
        start, stop = heappop(self._heap)
        if start + 1 < stop:
            heappush(self._heap, (start + 1, stop))
        return start

    def add(self, number: int) -> None:
        """Add a number that is not in the set."""
        heappush(self._heap, (number, number + 1))
