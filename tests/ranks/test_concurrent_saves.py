"""Concurrent saves: of two jobs to one version, in the background, and with slow ranks."""

import threading
import time
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.buffers import shared_pool
from limpet.errors import AlreadyExists, CommitError, RankFailed
from limpet.ranks.group import current_group
from limpet.ranks.kv import Timeouts
from limpet.run.run import Run
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.snapshot.reader import open_snapshot
from limpet.storage.memory import MemoryStore
from tests.ranks.faults import SHORT_TIMEOUTS, assert_versions_intact, state_of
from tests.ranks.test_commit import assert_nothing_left
from tests.ranks.test_disagreement import make_job
from tests.waiting import check_at_once, run_threads


def save_version_1(job, outcomes):
    outcomes.extend(job.group.outcomes(lambda rank: job.save(rank, 1)))


@pytest.mark.slow
def test_one_of_two_jobs_commits_a_version_and_the_other_raises(trial_stores):
    """The jobs save at random speeds, so that each of them wins in some rounds."""
    winners = set()
    for seed in range(25):
        random, store = Random(seed), MemoryStore()
        jobs = [make_job(2, store) for _ in range(2)]
        max_delay = random.choice([0, 0, 0.001, 0.003])

        def delay(call, random=random, max_delay=max_delay):
            if call.target == "store":
                time.sleep(random.random() * max_delay)

        outcomes: list[list[Any]] = [[], []]

        for job in jobs:
            for rank in job.ranks:
                rank.before_call = delay
        run_threads(
            threading.Thread(target=save_version_1, args=(jobs[n], outcomes[n])) for n in (0, 1)
        )
        committed = [all(isinstance(o, limpet.Snapshot) for o in of_job) for of_job in outcomes]
        assert sorted(committed) == [False, True], outcomes
        for outcome in outcomes[committed.index(False)]:
            assert isinstance(outcome, CommitError | AlreadyExists), outcome
            assert outcome.fields.get("outcome") != "unknown"
        winners.add(committed.index(True))
        for job in jobs:
            assert job.leftover_keys() == []
            job.group.close()
        assert_versions_intact(store, [1])
    assert winners == {0, 1}
    assert_nothing_left(trial_stores)


def test_a_process_of_an_earlier_start_that_continues_to_write_does_no_harm(trial_stores):
    """Rank 1 of the old job hangs in its shard until a new job has saved the same version.

    Then it continues to write, and rank 0 of the old job tries to commit.
    """
    store = MemoryStore()
    old, new = make_job(2, store, Timeouts(60, 600)), make_job(2, store)
    hung, release = threading.Event(), threading.Event()

    def hang(call):
        if call.method == "commit":
            hung.set()
            release.wait(30)

    old.ranks[1].before_call = hang
    outcomes: list[Any] = []
    thread = threading.Thread(target=save_version_1, args=(old, outcomes))
    thread.start()
    assert hung.wait(30)
    new.group.run(lambda rank: new.save(rank, 1))
    digest = open_snapshot(new.url(0, 1)).digest
    release.set()
    thread.join()
    assert all(isinstance(o, CommitError) for o in outcomes), outcomes
    assert open_snapshot(new.url(0, 1)).digest == digest
    new.group.run(lambda rank: new.save(rank, 2))
    for job in (old, new):
        job.group.close()
    assert_versions_intact(store, [1, 2])
    swept = Run(store).sweep(grace=0, now=time.time() + 1000)
    assert swept.kept == []
    assert_versions_intact(store, [1, 2])
    assert_nothing_left(trial_stores)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_failed_save_in_flight_does_not_affect_the_others(trial_stores, victim):
    """The failed save raises in its own ``wait``, on every rank."""
    store = MemoryStore()
    job = make_job(3, store)

    def fault(call):
        if call.method == "commit" and call.key.startswith("version_2/"):
            raise limpet.errors.NoSpace("The disk is full", key=call.key)

    job.ranks[victim].before_call = fault

    def work(rank):
        pendings = [
            limpet.save_async(job.url(rank, n), state_of(rank, 3, n), step=n) for n in (1, 2, 3)
        ]
        pendings[2].wait()
        with pytest.raises(limpet.errors.LimpetError, match="disk is full") as caught:
            pendings[1].wait()
        assert isinstance(caught.value, RankFailed) == (rank != victim)
        if rank != victim:
            assert caught.value.rank == victim
            assert "version_2/shard-0000" in caught.value.key
        pendings[0].wait()
        return job.save(rank, 4)

    job.group.run(work)
    assert job.leftover_keys() == []
    job.group.close()
    assert_versions_intact(store, [1, 3, 4])
    assert_nothing_left(trial_stores)


@pytest.mark.slow
def test_a_slow_rank_that_makes_progress_does_not_fail(trial_stores, monkeypatch):
    """One rank takes several times ``stuck`` seconds for an incremental save and for a load.

    It makes progress with each piece.
    """
    monkeypatch.setenv("LIMPET_THREADS", "1")
    check_at_once(check_slow_rank, [(0,), (1,)])


def check_slow_rank(slow):
    timeouts = Timeouts(silent=4.0, stuck=0.8)
    store = MemoryStore()
    job = make_job(2, store, timeouts)

    def delay(call):
        if call.method in ("write_at", "commit", "get_range") or "manifest" in call.key:
            time.sleep(0.4)

    def save(rank, step, base=None):
        location = Location(job.ranks[rank].store, f"version_{step}")
        pool = shared_pool()
        state = state_of(rank, 2, step)
        # larger than one piece, so that it is written and read in several pieces
        state["more"] = np.arange(step, step + 600) if base is None else base[1]
        metadata = VersionMetadata(step=step)
        save_job = begin_save(
            location,
            state,
            metadata,
            pool,
            stage_now=False,
            group=current_group(),
            base=base and base[0],
        )
        return finish_save(save_job), state["more"]

    bases = job.group.run(lambda rank: save(rank, 1))
    for operation in ("save", "load"):
        job.ranks[slow].before_call = delay
        began = time.monotonic()
        if operation == "load":
            loaded = [zero_state(rank) for rank in range(len(job.ranks))]
            job.group.run(partial(load_into, job, loaded))
            assert all(np.array_equal(state["more"], bases[0][1]) for state in loaded)
        else:
            saved = job.group.run(lambda rank: save(rank, 2, bases[rank]))
            assert saved[0][0].referred_bytes > 0
        assert time.monotonic() - began > 2 * timeouts.stuck


def load_into(job, states, rank):
    limpet.load(job.url(rank, 2), states[rank])


def zero_state(rank):
    return {**state_of(rank, 2, 0), "more": np.zeros(600, np.int64)}


@pytest.mark.slow
def test_two_collectives_that_wait_for_each_other_raise(trial_stores):
    """Rank 0 hangs in a save in the background and joins the next save in the foreground, while
    rank 1 waits for the first one. Each rank sees that the other one waits, which is no progress.
    """
    store = MemoryStore()
    job = make_job(2, store)
    release = threading.Event()
    all_raised = threading.Barrier(3, action=release.set)

    def hang(call):
        if call.method == "commit" and call.key.startswith("version_1/"):
            release.wait(60)

    job.ranks[0].before_call = hang

    def work(rank):
        pending = limpet.save_async(job.url(rank, 1), state_of(rank, 2, 1), step=1)
        caught: list[BaseException] = []

        def wait():
            if rank == 1:
                with pytest.raises(RankFailed) as error_info:
                    pending.wait()
                caught.append(error_info.value)
            all_raised.wait(60)

        if rank == 1:
            wait()
            return caught[0].rank
        try:
            return job.save(rank, 2)
        except RankFailed as e:
            return e.rank
        finally:
            all_raised.wait(60)
            with pytest.raises(RankFailed):
                pending.wait()

    third_party = threading.Thread(target=lambda: all_raised.wait(60))
    third_party.start()
    began = time.monotonic()
    failed_ranks = job.group.run(work)
    third_party.join()
    assert time.monotonic() - began < 4 * SHORT_TIMEOUTS.stuck
    assert failed_ranks == [1, 0]
    job.group.close()
    assert_nothing_left(trial_stores)
