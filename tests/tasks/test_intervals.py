"""Sets of task numbers, against Python's sets."""

from hypothesis import given
from hypothesis import strategies as st

from limpet.tasks.tables import IntervalSet


@given(st.lists(st.integers(0, 30), unique=True))
def test_a_set_of_intervals_is_a_set(numbers):
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
