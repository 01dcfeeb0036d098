"""What Orbax's policies save and keep, next to what those of Limpet do.

The tables list the documented behavior of Orbax, which is not installed here: the docstrings of
``save_decision_policy.py`` and ``preservation_policy.py`` in
``checkpoint/orbax/checkpoint/_src/checkpoint_managers`` of https://github.com/google/orbax, and the
cases of ``preservation_policy_test.py`` there, read on 2026-11-26. Where the two differ, ``why``
says so. Limpet then saves and keeps more, never less, except in the cases that name a rule.
"""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from limpet.format.names import Version
from limpet.run.policy import (
    AtSteps,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepSteps,
    PolicyInput,
    Record,
    SavePolicy,
)

STEPS = range(5)
UNEVEN = [0, 1, 2, 4, 5, 8, 9, 13, 14, 25]


class Kept(NamedTuple):
    """A row: the policy of Orbax, the steps with their losses, and what each of the two keeps.

    The version of step ``n`` has been trained for ``n`` seconds.
    """

    orbax: str
    steps: Sequence[int]
    kept: Sequence[int]
    policy: KeepPolicy
    kept_here: Sequence[int] | None = None
    why: str = ""
    losses: Sequence[float | None] = ()


KEPT = [
    Kept("PreserveAll()", STEPS, STEPS, KeepPolicy()),
    Kept("LatestN(n=3)", STEPS, [2, 3, 4], KeepLast(3)),
    Kept("LatestN(n=15)", STEPS, STEPS, KeepLast(15)),
    Kept("EveryNSteps(1)", STEPS, STEPS, KeepEvery(1)),
    Kept("EveryNSteps(3)", STEPS, [0, 3], KeepEvery(3)),
    Kept("EveryNSteps(6)", STEPS, [0], KeepEvery(6)),
    Kept("EveryNSteps(3)", [0, 1, 2, 4], [0], KeepEvery(3), [0, 4],
         "the first version after a multiple without a version stands for it"),
    Kept("EveryNSteps(3, exact_interval=False)", [0, 1, 2, 4], [0, 4], KeepEvery(3)),
    Kept("EveryNSteps(3, exact_interval=False)", UNEVEN, [0, 4, 8, 13, 25], KeepEvery(3),
         [0, 4, 8, 9, 13, 25],
         "multiples count, not the distance from the version kept before, so that a version that"
         " is lost changes nothing for the later ones"),
    Kept("EveryNSeconds(1)", STEPS, STEPS, KeepEvery(seconds=1)),
    Kept("EveryNSeconds(3)", STEPS, [0, 3], KeepEvery(seconds=3)),
    Kept("EveryNSeconds(6)", STEPS, [0], KeepEvery(seconds=6)),
    Kept("EveryNSeconds(3)", [1, 2, 4, 5, 8], [1, 4, 8], KeepEvery(seconds=3), [4, 8],
         "rule: of the first interval, only the version of step 0 is kept, not the first one"),
    Kept("EveryNSeconds(3)", [0, 4, 6, 7, 9], [0, 4, 7], KeepEvery(seconds=3), [0, 4, 6, 9],
         "rule: multiples count, as for steps: 6 stands for the second one, and not 7"),
    Kept("CustomSteps([0, 2, 3])", STEPS, [0, 2, 3], KeepSteps([0, 2, 3])),
    Kept("CustomSteps([14, 13])", STEPS, [], KeepSteps([14, 13])),
    Kept("CustomSteps([3])", [0, 1, 2, 4], [], KeepSteps([3]), [4],
         "the first version after a listed step stands for it, as AtSteps saves that one"),
    Kept("BestN(n=1, reverse=True)", STEPS, [1, 2, 3], KeepBest(1, "loss", unscored=2),
         losses=[7, None, 4, None, 5]),
    Kept("BestN(n=1, reverse=True)", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5],
         KeepBest(1, "loss", unscored=9), losses=[None, None, 4, None, 5, None]),
    Kept("BestN(n=4, reverse=True, keep_checkpoints_without_metrics=False)", STEPS, [0, 2, 4],
         KeepBest(4, "loss"), losses=[5, None, 4, None, 7]),
    Kept("BestN(n=2, keep_checkpoints_without_metrics=False)", STEPS, [0, 4],
         KeepBest(2, "loss", mode="max"), losses=[5, None, 4, None, 7]),
    Kept("BestN(n=1, reverse=True, keep_checkpoints_without_metrics=False)", STEPS, [3],
         KeepBest(1, "loss"), losses=[2, 1, 3, 1, 2]),
    Kept("AnyPreservationPolicy([LatestN(n=2), EveryNSteps(3)])", range(8), [0, 3, 6, 7],
         KeepLast(2) | KeepEvery(3)),
]  # fmt: skip


@pytest.mark.parametrize("row", KEPT, ids=lambda row: row.orbax)
def test_keep_policies_keep_what_those_of_orbax_keep(row):
    losses = row.losses or [None] * len(row.steps)
    records = [
        Record(Version(step), {} if loss is None else {"loss": loss}, float(step))
        for step, loss in zip(row.steps, losses, strict=True)
    ]
    found = sorted(version.step for version in row.policy.keep(records))
    expected = row.kept if row.kept_here is None else row.kept_here
    assert found == list(expected)
    assert bool(row.why) == (list(row.kept) != found), "only a difference needs a reason"
    assert row.why.startswith("rule: ") or {*row.kept} <= {*found}, "nothing is lost"


class Saved(NamedTuple):
    """A row: the policy of Orbax, the steps at which it is asked, and what each of the two saves.

    Step ``n`` ends at second ``n``.
    """

    orbax: str
    steps: Sequence[int]
    saved: Sequence[int]
    policy: SavePolicy
    saved_here: Sequence[int] | None = None
    why: str = ""


SAVED = [
    Saved("FixedIntervalPolicy(3)", range(1, 8), [3, 6], EverySteps(3)),
    Saved("FixedIntervalPolicy(3)", [2, 4, 6, 8], [6], EverySteps(3), [4, 6],
          "a multiple that is passed over, as by step(steps=2), is not lost"),
    Saved("SpecificStepsPolicy([2, 5])", range(1, 8), [2, 5], AtSteps([2, 5])),
    Saved("SpecificStepsPolicy([2, 5])", [2, 4, 6, 8], [2], AtSteps([2, 5]), [2, 6],
          "a listed step that is passed over is not lost"),
    Saved("ContinuousCheckpointingPolicy(minimum_interval_secs=10)", range(1, 26), [1, 11, 21],
          EverySeconds(10), [10, 20],
          "rule: the interval counts from the start of the training, whose state has no step"),
    Saved("AnySavePolicy([FixedIntervalPolicy(4), SpecificStepsPolicy([2])])", range(1, 10),
          [2, 4, 8], EverySteps(4) | AtSteps([2])),
]  # fmt: skip


@pytest.mark.parametrize("row", SAVED, ids=lambda row: row.orbax)
def test_save_policies_save_what_those_of_orbax_save(row):
    found: list[int] = []
    last = 0
    for step in row.steps:
        if row.policy.due(PolicyInput(step, float(step), 0, last, float(last), 0)):
            found.append(step)
            last = step
    expected = row.saved if row.saved_here is None else row.saved_here
    assert found == list(expected)
    assert bool(row.why) == (list(row.saved) != found), "only a difference needs a reason"
    assert row.why.startswith("rule: ") or {*row.saved} <= {*found}, "nothing is lost"
