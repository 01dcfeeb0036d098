"""One rank has bad luck at any of its calls to the board or the store: all others raise within a
bound, naming it, or all see the snapshot committed; and the next save works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from holdfast.errors import CommitError, NoSpace, RankFailed, StoreError, Unavailable
from tests.crash.conftest import PoolTracker
from tests.ranks.faults import (
    Call,
    ThreadedJob,
    Trial,
    hang_rank,
    kill_rank,
    kill_store,
    raise_error,
    record_calls,
    run_trials,
)

SAVES = pytest.mark.parametrize(
    "save", [ThreadedJob.save, ThreadedJob.save_async], ids=["save", "save_async"]
)
MANIFEST = "version_1/manifest.json"
Save = Callable[[ThreadedJob, int, int], Any]


def nothing_left(trial_stores: PoolTracker) -> None:
    """No buffer is held, no thread goes on."""
    trial_stores.assert_all_freed()
    assert [t.name for t in threading.enumerate() if t.name.startswith(("rank", "holdf"))] == []


def only_at_the_commit(trials: list[Trial]) -> None:
    """Who raises knows that nothing was committed, but for the moment of the commit itself."""
    unsure = {t.call.key for t in trials if t.uncertain_ranks()}
    assert unsure <= {MANIFEST}


@SAVES
def test_without_bad_luck_nothing_is_left(trial_stores: PoolTracker, save: Save) -> None:
    for size in (2, 3, 4):
        trial = Trial(size, 0, Call("none", "", "", 1), kill_rank, save).run()
        assert not trial.fired_at
        trial.check()
        assert trial.committed
        assert trial.job.leftover_keys() == []
        trial.check_next_save(same_ranks=True)
    nothing_left(trial_stores)


@pytest.mark.slow
@SAVES
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_dies(trial_stores: PoolTracker, size: int, save: Save) -> None:
    calls = record_calls(size, save)
    trials = [Trial(size, r, call, kill_rank, save) for r in range(size) for call in calls[r]]
    if size == 4:
        trials = Random(4).sample(trials, 30)
    left = []

    def then(trial: Trial) -> None:
        left.append(len(trial.job.leftover_keys()))
        trial.check_next_save(same_ranks=False)

    run_trials(trials, then)
    assert (
        sum(bool(t.fired_at) for t in trials) > len(trials) * 0.5
    )  # the rest were not called again
    assert any(t.committed for t in trials)
    assert max(left) <= 4 * size, "what a dead rank leaves on the board grows with the ranks only"
    only_at_the_commit(trials)
    nothing_left(trial_stores)


@pytest.mark.slow
@SAVES
@pytest.mark.parametrize("size", [2, 3])
def test_a_call_fails(trial_stores: PoolTracker, size: int, save: Save) -> None:
    """All ranks live on: the same group saves again, and leaves nothing on the board."""
    calls = record_calls(size, save)
    trials = [
        Trial(size, r, call, raise_error(error), save)
        for r in range(size)
        for call in calls[r]
        for error in (NoSpace("The disk is full", key="k"), Unavailable("It does not answer"))
        if call.target == "store"
    ]
    run_trials(trials, lambda trial: trial.check_next_save(same_ranks=True))
    for trial in trials:
        assert trial.fired_at
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
    unsure = {t.call for t in trials if t.uncertain_ranks()}
    assert unsure <= {Call("store", "put_if_absent", MANIFEST, 1)}
    nothing_left(trial_stores)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_cannot_reach_the_board(trial_stores: PoolTracker, size: int) -> None:
    calls = record_calls(size)
    gone = raise_error(ConnectionError("reset by peer"))
    trials = [
        Trial(size, r, call, gone)
        for r in range(size)
        for call in calls[r]
        if call.target == "board"
    ]
    run_trials(trials, lambda trial: trial.check_next_save(same_ranks=False))
    for trial in trials:
        mine = trial.outcomes[trial.victim]
        assert not isinstance(mine, Exception) or isinstance(mine, RankFailed), trial
    nothing_left(trial_stores)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_call_does_not_return_until_all_others_have_given_up(
    trial_stores: PoolTracker, size: int
) -> None:
    calls = record_calls(size)
    trials = [Trial(size, r, call, hang_rank) for r in range(size) for call in calls[r]]
    run_trials(trials, lambda trial: trial.check_next_save(same_ranks=trial.call.target == "store"))
    only_at_the_commit([t for t in trials if t.call.target == "store"])
    nothing_left(trial_stores)


@pytest.mark.slow
@SAVES
@pytest.mark.parametrize("size", [2, 3])
def test_the_boards_host_dies(trial_stores: PoolTracker, size: int, save: Save) -> None:
    calls = record_calls(size, save)
    trials = [
        Trial(size, r, call, kill_store, save)
        for r in range(size)
        for call in calls[r]
        if call.target == "board"
    ]
    run_trials(trials, lambda trial: trial.check_next_save(same_ranks=False))
    assert any(t.committed for t in trials)
    nothing_left(trial_stores)
