"""Policies by tables: pure functions over records."""

from __future__ import annotations

import pytest

from holdfast.errors import HoldfastError
from holdfast.format.names import Version
from holdfast.policy import EverySeconds, EverySteps, KeepLast, KeepPolicy, Moment


def at(step: int, seconds: float = 0.0, last: tuple[int, float] = (0, 0.0)) -> Moment:
    return Moment(step, seconds, *last)


@pytest.mark.parametrize(
    ("step", "last", "due"),
    [(1, 0, False), (2, 0, False), (3, 0, True), (4, 3, False), (5, 3, False), (6, 3, True)],
)
def test_every_steps_is_due_at_multiples(step: int, last: int, due: bool) -> None:
    assert EverySteps(3).due(at(step, last=(last, 0.0))) is due


def test_every_steps_catches_up_after_a_multiple_was_jumped_over() -> None:
    assert EverySteps(100).due(at(205, last=(150, 0.0)))
    assert not EverySteps(100).due(at(205, last=(200, 0.0)))


@pytest.mark.parametrize(("now", "last", "due"), [(59.9, 0, False), (60, 0, True), (65, 60, False)])
def test_every_seconds_counts_from_the_last_save(now: float, last: float, due: bool) -> None:
    assert EverySeconds(60).due(at(1, now, (0, last))) is due


def test_either_policy_makes_a_save_due() -> None:
    either = EverySteps(10) | EverySeconds(60) | EverySteps(7)
    assert [s for s in range(1, 21) if either.due(at(s, 0.0, (s - 1, 0.0)))] == [7, 10, 14, 20]
    assert either.due(at(1, 61.0))


def test_keep_last() -> None:
    versions = [Version(s) for s in (10, 20, 30, 40)]
    assert KeepLast(3).keep(versions) == {Version(20), Version(30), Version(40)}
    assert KeepLast(9).keep(versions) == set(versions)
    assert (KeepLast(1) | KeepLast(2)).keep(versions) == {Version(30), Version(40)}
    assert KeepPolicy().keep(versions) == set(versions)


def test_a_hundred_versions_every_five_keep_three() -> None:
    """ElasticDL's case (BEHAVIOURS.md, B5): steps 5, keep 3: 90, 95 and 100 stay."""
    kept: list[Version] = []
    for step in range(1, 101):
        if EverySteps(5).due(at(step, last=(step - 1, 0.0))):
            kept = sorted(KeepLast(3).keep([*kept, Version(step)]))
    assert [v.step for v in kept] == [90, 95, 100]


@pytest.mark.parametrize(
    "make", [lambda: EverySteps(0), lambda: EverySeconds(0), lambda: KeepLast(0)]
)
def test_a_policy_that_can_never_fire_is_refused(make: object) -> None:
    with pytest.raises(HoldfastError, match="never"):
        make()  # type: ignore[operator]


def test_policies_are_values() -> None:
    assert EverySteps(3) | EverySeconds(5) == EverySteps(3) | EverySeconds(5)
    assert hash(KeepLast(3)) == hash(KeepLast(3))
