"""Ranks that do different things, or the same thing at different times."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import limpet
from limpet.errors import (
    AlreadyExists,
    CommitError,
    Denied,
    NotFound,
    PlanError,
    RankFailed,
    StoreError,
)
from limpet.ranks.kv import Timeouts
from limpet.storage.memory import MemoryStore
from tests.ranks.faults import SHORT_TIMEOUTS, ThreadedJob, assert_versions_intact, state_of
from tests.ranks.test_commit import assert_nothing_left
from tests.trainings import initial_state, state_after
from tests.waiting import check_at_once

Work = Callable[[int], Any]


def make_job(size, store, timeouts=SHORT_TIMEOUTS):
    return ThreadedJob(size, [store] * size, timeouts)


def check_next_save(job, store, step=9, earlier=()):
    """Check that the next save works and that the earlier calls left nothing behind but the
    ``earlier`` versions."""
    job.group.run(lambda rank: job.save(rank, step))
    assert job.leftover_keys() == []
    job.group.close()
    assert_versions_intact(store, [*earlier, step])


def errors_on_all_ranks(job, work, kind=RankFailed):
    """Run ``work``, which must fail on all ranks within a bounded time. Return the errors."""
    began = time.monotonic()
    outcomes = job.group.outcomes(work)
    assert time.monotonic() - began < 2 * SHORT_TIMEOUTS.stuck
    assert all(isinstance(o, kind) for o in outcomes), outcomes
    return outcomes


@pytest.mark.parametrize("other", [0, 1, 2])
def test_all_ranks_raise_when_one_saves_another_step(trial_stores, other):
    store = MemoryStore()
    job = make_job(3, store)
    outcomes = errors_on_all_ranks(job, lambda rank: job.save(rank, 1 + (rank == other)))
    assert any("version_2" in str(o) and "version_1" in str(o) for o in outcomes)
    assert len({o.rank for o in outcomes}) == 1  # it may be any rank: no rank knows which is wrong
    check_next_save(job, store)
    assert_nothing_left(trial_stores)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_all_ranks_raise_when_one_loads_while_the_others_save(trial_stores, other):
    store = MemoryStore()
    job = make_job(3, store)
    limpet.save(f"{job.urls[0]}/version_9", state_after(9))

    def work(rank):
        if rank == other:
            return limpet.load(job.url(rank, 9), initial_state())
        return job.save(rank, 1)

    outcomes = errors_on_all_ranks(job, work)
    assert any("the load of" in str(o) and "the save of" in str(o) for o in outcomes)
    check_next_save(job, store, 10, earlier=[9])


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("history", [1.0, 2.0, 3.0], PlanError),  # a different structure
        ("unsupported", object(), limpet.errors.Unsupported),
    ],
    ids=["structure", "unsupported"],
)
@pytest.mark.parametrize("other", [0, 1, 2])
def test_a_state_that_only_one_rank_has_raises_on_all(trial_stores, other, key, value, error):
    store = MemoryStore()
    job = make_job(3, store)

    def work(rank):
        state = state_of(rank, 3, 1)
        if rank == other:
            state[key] = value
        return limpet.save(job.url(rank, 1), state, step=1)

    outcomes = errors_on_all_ranks(job, work, error)
    assert len({str(o) for o in outcomes}) == 1
    assert key in str(outcomes[0])
    assert error is not PlanError or f"rank {other}" in str(outcomes[0])
    check_next_save(job, store)
    assert_nothing_left(trial_stores)


@pytest.mark.parametrize("seconds", [None, 30.0])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_all_ranks_raise_at_once_when_one_cannot_open_the_snapshot(trial_stores, other, seconds):
    store = MemoryStore()
    job = make_job(3, store, Timeouts(silent=30.0, stuck=60.0))
    limpet.save(f"{job.urls[0]}/version_8", state_after(8))

    def deny(call):
        if call.target == "store":
            raise Denied("not for this host", key=call.key)

    def load(rank):
        return limpet.load(job.url(rank, 8), initial_state(), timeout=seconds)

    job.ranks[other].before_call = deny
    for rank, outcome in enumerate(errors_on_all_ranks(job, load, StoreError | RankFailed)):
        assert type(outcome) is (Denied if rank == other else RankFailed)
        assert "not for this host" in str(outcome)
        assert outcome.fields.get("rank", rank) == other
    job.ranks[other].before_call = lambda call: None
    job.group.run(load)
    store.delete("version_8/manifest.json")
    errors_on_all_ranks(job, load, NotFound)
    check_next_save(job, store)


@pytest.mark.slow
@pytest.mark.parametrize("next_step", [1, 2], ids=["the same version", "the next version"])
def test_a_rank_that_missed_a_save_joins_the_next_one(trial_stores, next_step):
    """The rank raised before it called ``save``. It must not stay one call behind."""
    check_at_once(check_missed_save, [(other, next_step) for other in range(3)])
    assert_nothing_left(trial_stores)


def check_missed_save(other, next_step):
    store = MemoryStore()
    job = make_job(3, store)

    def work(rank):
        if rank == other:
            raise RankFailed("something of its own", rank=other)
        return job.save(rank, 1)

    assert {o.rank for o in errors_on_all_ranks(job, work)} == {other}
    if next_step == 1:  # once, the rank is indistinguishable from a late one
        assert {o.rank for o in errors_on_all_ranks(job, lambda rank: job.save(rank, 1))} == {other}
    job.group.run(lambda rank: job.save(rank, next_step))
    check_next_save(job, store, next_step + 1, earlier=[next_step])


@pytest.mark.slow
def test_a_rank_that_joins_after_the_others_failed_raises_at_once(trial_stores):
    """The next save of all ranks works."""
    check_at_once(check_late_join, [(other,) for other in range(3)])
    assert_nothing_left(trial_stores)


def check_late_join(other):
    store = MemoryStore()
    job = make_job(3, store)
    others_failed = threading.Barrier(3)

    def work(rank):
        if rank == other:
            others_failed.wait(30)
            began = time.monotonic()
        try:
            return job.save(rank, 1)
        finally:
            if rank == other:
                assert time.monotonic() - began < SHORT_TIMEOUTS.silent
            else:
                others_failed.wait(30)

    assert {o.rank for o in errors_on_all_ranks(job, work)} == {other}
    check_next_save(job, store)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_all_ranks_raise_when_one_repeats_a_save(trial_stores, other):
    """The second save of one rank meets the next save of the others, and all raise at once."""
    store = MemoryStore()
    job = make_job(3, store)

    def work(rank):
        job.save(rank, 1)
        return job.save(rank, 1 if rank == other else 2)

    outcomes = errors_on_all_ranks(job, work, CommitError if other else Exception)
    assert all(isinstance(o, RankFailed | AlreadyExists) for o in outcomes)
    check_next_save(job, store, 3, earlier=[1])
    assert_nothing_left(trial_stores)
