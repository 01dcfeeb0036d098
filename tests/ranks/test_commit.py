"""One rank has bad luck at any of its calls to the board or the store: all others raise within a
bound, naming it, or all see the snapshot committed; and the next save works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from holdfast.errors import CommitError, NoSpace, RankFailed, StoreError, Unavailable
from tests.crash.conftest import Pools
from tests.ranks.faults import (
    Call,
    Crew,
    Trial,
    all_boards_die,
    calls_of,
    dies,
    every,
    fails,
    hangs,
)

SAVES = pytest.mark.parametrize("save", [Crew.save, Crew.save_async], ids=["save", "save_async"])
MANIFEST = "version_1/manifest.json"
Save = Callable[[Crew, int, int], Any]


def nothing_left(seas: Pools) -> None:
    """No buffer is held, no thread goes on."""
    seas.check()
    assert [t.name for t in threading.enumerate() if t.name.startswith(("rank", "holdf"))] == []


def only_at_the_commit(trials: list[Trial]) -> None:
    """Who raises knows that nothing was committed, but for the moment of the commit itself."""
    unsure = {t.call.key for t in trials if t.unknown()}
    assert unsure <= {MANIFEST}


@SAVES
def test_without_bad_luck_nothing_is_left(seas: Pools, save: Save) -> None:
    for size in (2, 3, 4):
        trial = Trial(size, 0, Call("none", "", "", 1), dies, save).run()
        assert not trial.fired
        trial.check()
        assert trial.committed
        assert trial.crew.keys() == []
        trial.goes_on(again=True)
    nothing_left(seas)


@pytest.mark.slow
@SAVES
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_dies(seas: Pools, size: int, save: Save) -> None:
    calls = calls_of(size, save)
    trials = [Trial(size, r, call, dies, save) for r in range(size) for call in calls[r]]
    if size == 4:
        trials = Random(4).sample(trials, 30)
    left = []

    def then(trial: Trial) -> None:
        left.append(len(trial.crew.keys()))
        trial.goes_on(again=False)

    every(trials, then)
    assert sum(bool(t.fired) for t in trials) > len(trials) * 0.5  # the rest were not called again
    assert any(t.committed for t in trials)
    assert max(left) <= 4 * size, "what a dead rank leaves on the board grows with the ranks only"
    only_at_the_commit(trials)
    nothing_left(seas)


@pytest.mark.slow
@SAVES
@pytest.mark.parametrize("size", [2, 3])
def test_a_call_fails(seas: Pools, size: int, save: Save) -> None:
    """All ranks live on: the same group saves again, and leaves nothing on the board."""
    calls = calls_of(size, save)
    trials = [
        Trial(size, r, call, fails(error), save)
        for r in range(size)
        for call in calls[r]
        for error in (NoSpace("The disk is full", key="k"), Unavailable("It does not answer"))
        if call.to == "store"
    ]
    every(trials, lambda trial: trial.goes_on(again=True))
    for trial in trials:
        assert trial.fired
        mine = trial.outcomes[trial.victim]
        if trial.call.method == "delete":  # of a pin
            assert trial.committed
            continue
        assert isinstance(mine, StoreError | CommitError), trial
        for rank, outcome in enumerate(trial.outcomes):
            assert isinstance(outcome, StoreError | CommitError), trial
            if rank != trial.victim:
                assert isinstance(outcome.__cause__, type(mine)), trial
                assert str(mine) in str(outcome), trial
    unsure = {t.call for t in trials if t.unknown()}
    assert unsure <= {Call("store", "put_if_absent", MANIFEST, 1)}
    nothing_left(seas)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_cannot_reach_the_board(seas: Pools, size: int) -> None:
    calls = calls_of(size)
    gone = fails(ConnectionError("reset by peer"))
    trials = [
        Trial(size, r, call, gone) for r in range(size) for call in calls[r] if call.to == "board"
    ]
    every(trials, lambda trial: trial.goes_on(again=False))
    for trial in trials:
        mine = trial.outcomes[trial.victim]
        assert not isinstance(mine, Exception) or isinstance(mine, RankFailed), trial
    nothing_left(seas)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_call_does_not_return_until_all_others_have_given_up(seas: Pools, size: int) -> None:
    calls = calls_of(size)
    trials = [Trial(size, r, call, hangs) for r in range(size) for call in calls[r]]
    every(trials, lambda trial: trial.goes_on(again=trial.call.to == "store"))
    only_at_the_commit([t for t in trials if t.call.to == "store"])
    nothing_left(seas)


@pytest.mark.slow
@SAVES
@pytest.mark.parametrize("size", [2, 3])
def test_the_boards_host_dies(seas: Pools, size: int, save: Save) -> None:
    calls = calls_of(size, save)
    trials = [
        Trial(size, r, call, all_boards_die, save)
        for r in range(size)
        for call in calls[r]
        if call.to == "board"
    ]
    every(trials, lambda trial: trial.goes_on(again=False))
    assert any(t.committed for t in trials)
    nothing_left(seas)
