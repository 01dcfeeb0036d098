"""Ranks that do not do the same, or not at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.engine.distributed.kv import Timeouts
from holdfast.errors import AlreadyExists, CommitError, PlanError, RankFailed
from holdfast.storage.memory import MemoryStore
from tests.crash.conftest import PoolTracker
from tests.ranks.faults import SHORT_TIMEOUTS, ThreadedJob, assert_versions_intact, state_of
from tests.ranks.test_commit import nothing_left
from tests.trainings import initial_state, state_after

Work = Callable[[int], Any]


def crew_of(size: int, store: MemoryStore, patience: Timeouts = SHORT_TIMEOUTS) -> ThreadedJob:
    return ThreadedJob(size, [store] * size, patience)


def goes_on(crew: ThreadedJob, store: MemoryStore, step: int = 9) -> None:
    """The next save of all works, and nothing is left of those before it."""
    crew.group.run(lambda rank: crew.save(rank, step))
    assert crew.leftover_keys() == []
    crew.group.close()
    assert_versions_intact(store, [step])


def all_fail(crew: ThreadedJob, work: Work, kind: type[Exception] = RankFailed) -> list[Any]:
    began = time.monotonic()
    outcomes = crew.group.outcomes(work)
    assert time.monotonic() - began < 2 * SHORT_TIMEOUTS.stuck
    assert all(isinstance(o, kind) for o in outcomes), outcomes
    return outcomes


@pytest.mark.parametrize("other", [0, 1, 2])
def test_another_step(trial_stores: PoolTracker, other: int) -> None:
    store = MemoryStore()
    crew = crew_of(3, store)
    outcomes = all_fail(crew, lambda rank: crew.save(rank, 1 + (rank == other)))
    assert any("version_2" in str(o) and "version_1" in str(o) for o in outcomes)
    assert len({o.rank for o in outcomes}) == 1  # which of the two is wrong nobody can know
    goes_on(crew, store)
    nothing_left(trial_stores)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_one_loads_while_the_others_save(trial_stores: PoolTracker, other: int) -> None:
    store = MemoryStore()
    crew = crew_of(3, store)
    holdfast.save(f"{crew.urls[0]}/version_9", state_after(9))

    def work(rank: int) -> Any:
        if rank == other:
            return holdfast.load(crew.url(rank, 9), initial_state())
        return crew.save(rank, 1)

    outcomes = all_fail(crew, work)
    assert any("the load of" in str(o) and "the save of" in str(o) for o in outcomes)
    crew.group.run(lambda rank: crew.save(rank, 10))
    assert crew.leftover_keys() == []
    crew.group.close()
    assert_versions_intact(store, [9, 10])


@pytest.mark.parametrize("other", [0, 1, 2])
def test_another_structure(trial_stores: PoolTracker, other: int) -> None:
    store = MemoryStore()
    crew = crew_of(3, store)

    def work(rank: int) -> Any:
        state = state_of(rank, 3, 1)
        if rank == other:
            state["history"] = [1.0, 2.0, 3.0]
        return holdfast.save(crew.url(rank, 1), state, step=1)

    outcomes = all_fail(crew, work, PlanError)
    assert len({str(o) for o in outcomes}) == 1
    assert "history" in str(outcomes[0])
    assert f"rank {other}" in str(outcomes[0])
    goes_on(crew, store)
    nothing_left(trial_stores)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_a_state_that_cannot_be_saved_on_one_rank(trial_stores: PoolTracker, other: int) -> None:
    store = MemoryStore()
    crew = crew_of(3, store)

    def work(rank: int) -> Any:
        state = state_of(rank, 3, 1)
        if rank == other:
            state["odd"] = object()
        return holdfast.save(crew.url(rank, 1), state, step=1)

    outcomes = all_fail(crew, work, holdfast.errors.Unsupported)
    assert len({str(o) for o in outcomes}) == 1
    assert "odd" in str(outcomes[0])
    goes_on(crew, store)
    nothing_left(trial_stores)


@pytest.mark.slow
@pytest.mark.parametrize("again", [1, 2], ids=["the same version again", "the next version"])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_a_rank_that_did_not_come_is_there_the_next_time(
    trial_stores: PoolTracker, other: int, again: int
) -> None:
    """It raised before it called ``save``: it must not be one call behind for ever."""
    store = MemoryStore()
    crew = crew_of(3, store)

    def work(rank: int) -> Any:
        if rank == other:
            raise RankFailed("something of its own", rank=other)
        return crew.save(rank, 1)

    assert {o.rank for o in all_fail(crew, work)} == {other}
    if again == 1:  # it cannot be told from one that is late, once
        assert {o.rank for o in all_fail(crew, lambda rank: crew.save(rank, 1))} == {other}
    crew.group.run(lambda rank: crew.save(rank, again))
    goes = again + 1
    crew.group.run(lambda rank: crew.save(rank, goes))
    crew.group.close()
    assert crew.leftover_keys() == []
    assert_versions_intact(store, [again, goes])
    nothing_left(trial_stores)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("other", [0, 2])
def test_a_rank_that_missed_several(trial_stores: PoolTracker, other: int, times: int) -> None:
    store = MemoryStore()
    crew = crew_of(3, store)

    def work(rank: int) -> Any:
        errors = []
        for step in range(1, times + 1) if rank != other else ():
            with pytest.raises(RankFailed) as caught:
                crew.save(rank, step)
            errors.append(caught.value.rank)
        return errors

    made = crew.group.run(work)
    assert made == [[] if r == other else [other] * times for r in range(3)]
    goes_on(crew, store)
    nothing_left(trial_stores)


@pytest.mark.slow
@pytest.mark.parametrize("other", [0, 1, 2])
def test_a_late_rank(trial_stores: PoolTracker, other: int) -> None:
    """The others have given it up: it raises at once, and the next save is of all."""
    store = MemoryStore()
    crew = crew_of(3, store)
    gone = threading.Barrier(3)

    def work(rank: int) -> Any:
        if rank == other:
            gone.wait(30)
            began = time.monotonic()
        try:
            return crew.save(rank, 1)
        finally:
            if rank == other:
                assert time.monotonic() - began < SHORT_TIMEOUTS.silent
            else:
                gone.wait(30)

    assert {o.rank for o in all_fail(crew, work)} == {other}
    goes_on(crew, store)
    nothing_left(trial_stores)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_a_rank_saves_twice(trial_stores: PoolTracker, other: int) -> None:
    """Its second save meets the next one of the others: all raise at once."""
    store = MemoryStore()
    crew = crew_of(3, store)

    def work(rank: int) -> Any:
        crew.save(rank, 1)
        return crew.save(rank, 1 if rank == other else 2)

    outcomes = all_fail(crew, work, CommitError if other else Exception)
    assert all(isinstance(o, RankFailed | AlreadyExists) for o in outcomes)
    crew.group.run(lambda rank: crew.save(rank, 3))
    assert crew.leftover_keys() == []
    crew.group.close()
    assert_versions_intact(store, [1, 3])
    nothing_left(trial_stores)
