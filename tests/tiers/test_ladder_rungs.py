"""``decide``: the whole rule of the restore ladder, as a table."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from limpet.format.names import Version
from limpet.tiers.ladder import Plan, Rung, decide
from limpet.tiers.restarts import Restart

V20, V40, V50 = Version(20), Version(40), Version(50)


def restart(
    rung: int = 0, goal: int = 50, *, memory: bool = False, skipped: Version | None = None
) -> Restart:
    if rung == Rung.OLDER and skipped is None:
        skipped = V50
    left = None if skipped is None else str(skipped)
    version = f"version_{goal}" if goal >= 0 else None
    tier: Any = "memory" if memory else None
    return Restart(rung, goal, version, None, tier, left, "2026-01-02T03:04:05+00:00")


def suspect(memory: bool) -> Restart:
    return structs.replace(restart(goal=54, memory=memory), has_nan=True)


NEWEST = [restart()] * 3
IN_MEMORY = [restart(goal=54), restart(goal=54), restart(goal=54, memory=True)]
DURABLE = [restart(1, 54)] * 3
OLDER = [restart(2, 54)] * 3


@pytest.mark.parametrize(
    ("restarts", "newest", "versions", "rung", "number", "skipped"),
    [
        # a NaN soon after a restore from a tier
        ([suspect(True)], 54, [V50], Rung.DURABLE, 1, None),
        ([suspect(False)], 54, [V50], Rung.NEWEST, 2, None),
        ([suspect(True), *DURABLE[:1]], 54, [V50], Rung.DURABLE, 2, None),
        ([suspect(True)], 55, [V50], Rung.NEWEST, 1, None),
        # the first start, and restarts that are not yet three
        ([], -1, [], Rung.NEWEST, 1, None),
        ([], 50, [V50, V40], Rung.NEWEST, 1, None),
        (NEWEST[:1], 50, [V50, V40], Rung.NEWEST, 2, None),
        (NEWEST[:2], 50, [V50, V40], Rung.NEWEST, 3, None),
        # three: the states in memory are set aside only if they have been used
        (NEWEST, 50, [V50, V40], Rung.OLDER, 1, V50),
        (IN_MEMORY, 54, [V50, V40], Rung.DURABLE, 1, None),
        (IN_MEMORY, 50, [V50], Rung.DURABLE, 1, None),
        (IN_MEMORY, 54, [], Rung.DURABLE, 1, None),
        ([*IN_MEMORY, *DURABLE[:1]], 54, [V50, V40], Rung.DURABLE, 2, None),
        ([*IN_MEMORY, *DURABLE[:2]], 54, [V50, V40], Rung.DURABLE, 3, None),
        ([*IN_MEMORY, *DURABLE], 54, [V50, V40], Rung.OLDER, 1, V50),
        # one version back: the version that was left behind stays the same one
        ([*IN_MEMORY, *DURABLE, *OLDER[:1]], 40, [V40, V20], Rung.OLDER, 2, V50),
        ([*IN_MEMORY, *DURABLE, *OLDER[:2]], 50, [V50, V40], Rung.OLDER, 3, V50),
        ([*NEWEST, *OLDER], 40, [V40, V20], Rung.GIVE_UP, 1, None),
        ([*IN_MEMORY, *DURABLE, *OLDER], 50, [V50, V40], Rung.GIVE_UP, 1, None),
        # nothing to go back to
        (NEWEST, 50, [V50], Rung.GIVE_UP, 1, None),
        ([restart(goal=-1)] * 3, -1, [], Rung.GIVE_UP, 1, None),
        ([*IN_MEMORY, *DURABLE], 54, [V50], Rung.GIVE_UP, 1, None),
        # a newer state is progress, at whatever rung
        ([restart(goal=-1)] * 3, 0, [Version(0)], Rung.NEWEST, 1, None),
        (NEWEST, 51, [V50, V40], Rung.NEWEST, 1, None),
        (IN_MEMORY, 55, [V50, V40], Rung.NEWEST, 1, None),
        ([*IN_MEMORY, *DURABLE, *OLDER], 55, [V50, V40], Rung.NEWEST, 1, None),
        # after going back, the step that it died at before is none
        ([*NEWEST, *OLDER], 54, [V50, V40], Rung.GIVE_UP, 1, None),
        ([*NEWEST, *OLDER[:1]], 52, [V50, V40], Rung.OLDER, 2, V50),
        # each restart counts by itself: 60 is progress after 50, though there was a 70 once
        ([restart(goal=70), restart(), restart()], 60, [V50], Rung.NEWEST, 2, None),
        # the lower rungs may have been deleted, or may be damaged
        (OLDER[:1], 40, [V40], Rung.OLDER, 2, V50),
        (OLDER, 40, [V40], Rung.GIVE_UP, 1, None),
        (DURABLE, 50, [V50, V40], Rung.OLDER, 1, V50),
        ([restart(goal=50)] * 40, 50, [V50, V40], Rung.OLDER, 1, V50),
    ],
)
def test_the_rule(
    restarts: list[Restart],
    newest: int,
    versions: list[Version],
    rung: Rung,
    number: int,
    skipped: Version | None,
) -> None:
    plan = decide(restarts, newest, versions)
    assert (plan.rung, plan.number, plan.skipped) == (rung, number, skipped)
    assert plan.goes_back == (rung == Rung.OLDER and not any(r.rung == 2 for r in plan.counted))


@pytest.mark.parametrize(
    ("plan", "loaded", "goal"),
    [
        (Plan(), -1, -1),
        (Plan(), 50, 50),
        (Plan(counted=[restart(goal=70)]), 50, 50),
        (Plan(Rung.DURABLE, IN_MEMORY), 50, 54),
        (Plan(Rung.OLDER, [*IN_MEMORY, *DURABLE], skipped=V50), 40, 54),
        (Plan(Rung.OLDER, [*NEWEST, *OLDER], skipped=V50), 60, 60),
    ],
)
def test_the_step_that_must_be_exceeded(plan: Plan, loaded: int, goal: int) -> None:
    assert plan.goal(loaded) == goal


@pytest.mark.parametrize(
    ("others", "own", "expected"),
    [
        ([], restart(), (Rung.NEWEST, 1, None)),
        (NEWEST[:2], restart(), (Rung.NEWEST, 3, None)),
        # without its own record, it would go back a second time
        (NEWEST, restart(2), (Rung.OLDER, 1, V50)),
        (IN_MEMORY, restart(1, 54), (Rung.DURABLE, 1, None)),
        ([*NEWEST, *OLDER[:2]], restart(2), (Rung.OLDER, 3, V50)),
        (NEWEST, restart(2, goal=30), (Rung.OLDER, 1, V50)),
    ],
)
def test_resuming_again_in_one_process_is_no_restart(
    others: list[Restart], own: Restart, expected: Any
) -> None:
    plan = decide(others, 50 if own.goal <= 50 else 54, [V50, V40], own)
    assert (plan.rung, plan.number, plan.skipped) == expected
