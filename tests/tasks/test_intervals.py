"""Sets of task numbers, against Python's sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from limpet.tasks.intervals import IntervalSet, OpenNumbers


@given(st.lists(st.integers(0, 30), unique=True))
def test_a_set_of_intervals_is_a_set(numbers: list[int]) -> None:
    intervals, expected = IntervalSet(), set()
    for number in numbers:
        intervals.add(number)
        expected.add(number)
        assert len(intervals) == len(expected)
        assert {n for n in range(-1, 32) if n in intervals} == expected
        bounds = [bound for interval in intervals for bound in interval]
        assert bounds == sorted(set(bounds))  # disjoint, not empty, and none touches another one
    assert {n for a, b in intervals.gaps(31) for n in range(a, b)} == {*range(31)} - expected
    assert list(IntervalSet(intervals)) == list(intervals)
    assert len(IntervalSet(intervals)) == len(expected)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4), st.data())
def test_open_numbers_are_handed_out_lowest_first(
    lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    intervals, start = [], 0
    for gap, length in lengths:
        intervals.append((start + gap, start + gap + length))
        start += gap + length
    numbers = OpenNumbers(intervals)
    expected = {n for a, b in intervals for n in range(a, b)}
    while expected:
        lowest = numbers.pop()
        assert lowest == min(expected)
        if data.draw(st.booleans()):
            numbers.add(lowest)
            assert numbers.pop() == lowest
        expected.remove(lowest)
    assert not numbers
