"""A fault at any call of one rank to the key-value client or to the store.

All other ranks raise within a bounded time and name that rank, or all ranks see the snapshot
committed. The next save works.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.errors import CommitError, NoSpace, RankFailed, StoreError, Unavailable
from limpet.saving import save as recipe
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup
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
JOBS = pytest.mark.parametrize(
    ("size", "save"), [(2, ThreadedJob.save), (3, ThreadedJob.save_async)], ids=["2", "3 async"]
)
MANIFEST = "version_1/manifest.json"
Save = Callable[[ThreadedJob, int, int], Any]


def assert_nothing_left(trial_stores):
    """Check that all buffers are released and that no thread of a rank is running."""
    trial_stores.assert_all_freed()
    assert [name for name in trial_stores.threads() if name.startswith(("rank", "limpet"))] == []


def assert_uncertain_only_at_commit(trials):
    """Check that the outcome was unknown only after a fault in a call for the manifest."""
    uncertain = {t.call.key for t in trials if t.uncertain_ranks()}
    assert uncertain <= {MANIFEST}


def trials_of_all_calls(size, *actions, target="", save=ThreadedJob.save):
    """One trial for each action at each call of each rank, or only at those to ``target``."""
    calls = record_calls(size, save)
    return [
        Trial(size, rank, call, action, save)
        for rank in range(size)
        for call in calls[rank]
        for action in actions
        if target in ("", call.target)
    ]


@SAVES
def test_a_save_without_a_fault_leaves_nothing(trial_stores, save):
    for size in (2, 3, 4):
        trial = Trial(size, 0, Call("none", "", "", 1), kill_rank, save).run()
        assert not trial.fired_at
        trial.check()
        assert trial.committed
        assert trial.job.leftover_keys() == []
        trial.check_next_save(same_ranks=True)
    assert_nothing_left(trial_stores)


@pytest.mark.slow
@JOBS
def test_all_ranks_raise_or_commit_when_a_rank_dies(trial_stores, size, save):
    trials = trials_of_all_calls(size, kill_rank, save=save)
    leftover_counts = []

    def check_after(trial):
        leftover_counts.append(len(trial.job.leftover_keys()))
        trial.check_next_save(same_ranks=False)

    run_trials(trials, check_after)
    # the other calls did not occur again
    assert sum(bool(t.fired_at) for t in trials) > len(trials) * 0.5
    assert any(t.committed for t in trials)
    assert max(leftover_counts) <= 4 * size, "a dead rank leaves more than 4 keys per rank"
    assert_uncertain_only_at_commit(trials)
    assert_nothing_left(trial_stores)


@pytest.mark.slow
@JOBS
def test_all_ranks_raise_when_a_call_fails(trial_stores, size, save):
    """All ranks stay alive. The same group saves again and leaves no keys behind."""
    errors = (NoSpace("The disk is full", key="k"), Unavailable("It does not answer"))
    trials = trials_of_all_calls(size, *map(raise_error, errors), target="store", save=save)
    run_trials(trials, lambda trial: trial.check_next_save(same_ranks=True))
    for trial in trials:
        assert trial.fired_at
        error = trial.outcomes[trial.victim]
        if trial.call.method == "delete":  # of a pin
            assert trial.committed
            continue
        assert isinstance(error, StoreError | CommitError), trial
        for rank, outcome in enumerate(trial.outcomes):
            assert isinstance(outcome, StoreError | CommitError), trial
            if rank != trial.victim:
                assert isinstance(outcome.__cause__, type(error)), trial
                assert str(error) in str(outcome), trial
    uncertain = {t.call for t in trials if t.uncertain_ranks()}
    assert uncertain <= {Call("store", "put_if_absent", MANIFEST, 1)}
    assert_nothing_left(trial_stores)


@pytest.mark.slow
def test_the_next_job_saves_after_a_rank_loses_its_connection(trial_stores):
    connection_lost = raise_error(ConnectionError("reset by peer"))
    trials = trials_of_all_calls(3, connection_lost, target="kv")
    run_trials(trials, lambda trial: trial.check_next_save(same_ranks=False))
    for trial in trials:
        outcome = trial.outcomes[trial.victim]
        assert not isinstance(outcome, Exception) or isinstance(outcome, RankFailed), trial
    assert_nothing_left(trial_stores)


@pytest.mark.slow
def test_the_other_ranks_raise_when_a_call_of_one_rank_hangs(trial_stores):
    trials = trials_of_all_calls(3, hang_rank)
    run_trials(trials, lambda trial: trial.check_next_save(same_ranks=trial.call.target == "store"))
    assert_uncertain_only_at_commit([t for t in trials if t.call.target == "store"])
    assert_nothing_left(trial_stores)


@pytest.mark.slow
@JOBS
def test_all_ranks_raise_or_commit_when_the_key_value_store_dies(trial_stores, size, save):
    trials = trials_of_all_calls(size, kill_store, target="kv", save=save)
    run_trials(trials, lambda trial: trial.check_next_save(same_ranks=False))
    assert any(t.committed for t in trials)
    assert_nothing_left(trial_stores)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_rank_that_writes_less_than_planned_is_named_and_nothing_is_committed(
    monkeypatch, incremental
):
    """Its files are in order; only the comparison with the plan shows what is missing."""
    this_thread, make_image = threading.local(), recipe.make_image

    def make_less(leaves, leaf_boxes, *, cache):
        dropped = 1 if this_thread.rank == 1 and this_thread.step == 2 else 0
        count = len(leaves) - dropped
        return make_image(leaves[:count], leaf_boxes[:count], cache=cache)

    store = MemoryStore()

    def save(rank, step):
        this_thread.rank, this_thread.step = rank, step
        state = {f"x{i}": np.full(4096, float(i)) for i in range(8)}
        with limpet.Checkpointer(store, state, incremental=incremental) as ckpt:
            ckpt.resume()
            ckpt.step()
            ckpt.save()

    monkeypatch.setattr(recipe, "make_image", make_less)
    with FakeGroup(2) as group:
        group.run(lambda rank: save(rank, 1))
        outcomes = group.outcomes(lambda rank: save(rank, 2))
    for outcome in outcomes:
        assert isinstance(outcome, CommitError)
        assert "rank 1 did not write what was planned" in str(outcome)
    assert [s.step for s in limpet.Run(store).snapshots()] == [1]
