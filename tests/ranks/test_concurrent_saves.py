"""Several saves at a time: of two jobs into one version, in the background, by slow ranks."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.buffers import shared_pool
from holdfast.engine.distributed.kv import Timeouts
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.save import begin_save, finish_save
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import open_snapshot
from holdfast.errors import AlreadyExists, CommitError, RankFailed
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from tests.crash.conftest import PoolTracker
from tests.ranks.faults import SHORT_TIMEOUTS, Call, ThreadedJob, assert_versions_intact, state_of
from tests.ranks.test_commit import nothing_left
from tests.ranks.test_disagreement import crew_of
from tests.trainings import initial_state, state_after, states_equal


def job(crew: ThreadedJob, outcomes: list[Any]) -> None:
    outcomes.extend(crew.group.outcomes(lambda rank: crew.save(rank, 1)))


# -- two groups ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_jobs_save_the_same_version(trial_stores: PoolTracker) -> None:
    """At random speeds, so that each of them wins: one commits, the other's ranks all raise."""
    winners = set()
    for seed in range(25):
        random, store = Random(seed), MemoryStore()
        crews = [crew_of(2, store) for _ in range(2)]
        slow = random.choice([0, 0, 0.001, 0.003])

        def dawdle(call: Call, random: Random = random, slow: float = slow) -> None:
            if call.target == "store":
                time.sleep(random.random() * slow)

        outcomes: list[list[Any]] = [[], []]

        for crew in crews:
            for rank in crew.ranks:
                rank.before_call = dawdle
        threads = [threading.Thread(target=job, args=(crews[n], outcomes[n])) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [all(isinstance(o, holdfast.Snapshot) for o in made) for made in outcomes]
        assert sorted(won) == [False, True], outcomes
        for outcome in outcomes[won.index(False)]:
            assert isinstance(outcome, CommitError | AlreadyExists), outcome
            assert outcome.fields.get("outcome") != "unknown"
        winners.add(won.index(True))
        for crew in crews:
            assert crew.leftover_keys() == []
            crew.group.close()
        assert_versions_intact(store, [1])
    assert winners == {0, 1}
    nothing_left(trial_stores)


def test_a_process_left_over_from_an_earlier_attempt_goes_on_writing(
    trial_stores: PoolTracker,
) -> None:
    """Its rank 1 hangs in the middle of its shard while the job is started again, saves that
    version, and goes on; then it writes on, and even its rank 0 would commit."""
    store = MemoryStore()
    old, new = crew_of(2, store, Timeouts(60, 600)), crew_of(2, store)
    hung, free = threading.Event(), threading.Event()

    def hang(call: Call) -> None:
        if call.method == "commit":
            hung.set()
            free.wait(30)

    old.ranks[1].before_call = hang
    outcomes: list[Any] = []
    job = threading.Thread(
        target=lambda: outcomes.extend(old.group.outcomes(lambda rank: old.save(rank, 1)))
    )
    job.start()
    assert hung.wait(30)
    new.group.run(lambda rank: new.save(rank, 1))
    digest = open_snapshot(new.url(0, 1)).digest
    free.set()
    job.join()
    assert all(isinstance(o, CommitError) for o in outcomes), outcomes
    assert open_snapshot(new.url(0, 1)).digest == digest
    new.group.run(lambda rank: new.save(rank, 2))
    for crew in (old, new):
        crew.group.close()
    assert_versions_intact(store, [1, 2])
    swept = Run(store).sweep(grace=0, now=time.time() + 1000)
    assert swept.kept == []
    assert_versions_intact(store, [1, 2])
    nothing_left(trial_stores)


# -- asynchronous saves ----------------------------------------------------------------------------


def test_several_in_flight_and_loads_between(trial_stores: PoolTracker) -> None:
    store = MemoryStore()
    crew = crew_of(3, store)

    def work(rank: int) -> Any:
        state = state_of(rank, 3, 1)
        first = holdfast.save_async(crew.url(rank, 1), state, step=1)
        second = holdfast.save_async(crew.url(rank, 2), state_of(rank, 3, 2), step=2)
        first.wait()
        live = initial_state()
        holdfast.load(crew.url(rank, 1), live)
        assert states_equal(live, state_after(1))
        third = holdfast.save_async(crew.url(rank, 3), state_of(rank, 3, 3), step=3)
        pendings = [second, third]
        for pending in pendings if rank % 2 else reversed(pendings):
            pending.wait()
        return crew.save(rank, 4)

    made = crew.group.run(work)
    assert len({s.digest for s in made}) == 1
    assert crew.leftover_keys() == []
    crew.group.close()
    assert_versions_intact(store, [1, 2, 3, 4])
    nothing_left(trial_stores)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_of_several_in_flight_fails(trial_stores: PoolTracker, victim: int) -> None:
    """On every rank at its ``wait``; the saves beside it and after it are none the worse."""
    store = MemoryStore()
    crew = crew_of(3, store)

    def peril(call: Call) -> None:
        if call.method == "commit" and call.key.startswith("version_2/"):
            raise holdfast.errors.NoSpace("The disk is full", key=call.key)

    crew.ranks[victim].before_call = peril

    def work(rank: int) -> Any:
        pendings = [
            holdfast.save_async(crew.url(rank, n), state_of(rank, 3, n), step=n) for n in (1, 2, 3)
        ]
        pendings[2].wait()
        with pytest.raises(holdfast.errors.HoldfastError, match="disk is full") as caught:
            pendings[1].wait()
        assert isinstance(caught.value, RankFailed) == (rank != victim)
        if rank != victim:
            assert caught.value.rank == victim
            assert "version_2/shard-0000" in caught.value.key
        pendings[0].wait()
        return crew.save(rank, 4)

    crew.group.run(work)
    assert crew.leftover_keys() == []
    crew.group.close()
    assert_versions_intact(store, [1, 3, 4])
    nothing_left(trial_stores)


# -- false alarms ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_is_slow_but_gets_on_is_never_given_up(
    trial_stores: PoolTracker, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes several times as long as a rank may be stuck, a piece at a time: a full save, an
    incremental one, and a load."""
    monkeypatch.setenv("HOLDFAST_THREADS", "1")
    patience = Timeouts(silent=4.0, stuck=0.8)
    store = MemoryStore()
    crew = crew_of(2, store, patience)

    def dawdle(call: Call) -> None:
        if call.method in ("write_at", "commit", "get_range") or "manifest" in call.key:
            time.sleep(0.4)

    def saved(rank: int, step: int, base: Any = None) -> Any:
        place = Location(crew.ranks[rank].store, f"version_{step}")
        pool = shared_pool()
        state = state_of(rank, 2, step)
        # larger than the parts that are written and read one by one
        state["more"] = np.arange(step, step + 600) if base is None else base[1]
        draft = begin_save(
            place, state, VersionMetadata(step=step), pool, stage_now=False, base=base and base[0]
        )
        return finish_save(draft), state["more"]

    bases = crew.group.run(lambda rank: saved(rank, 1))
    for method in (saved, None):
        crew.ranks[slow].before_call = dawdle
        began = time.monotonic()
        if method is None:
            loaded = crew.group.run(lambda rank: holdfast.load(crew.url(rank, 2), zeros(rank)))
            assert all(np.array_equal(state["more"], bases[0][1]) for state in loaded)
        else:
            made = crew.group.run(lambda rank: saved(rank, 2, bases[rank]))
            assert made[0][0].referred_bytes > 0
        assert time.monotonic() - began > 2 * patience.stuck


def zeros(rank: int) -> dict[str, Any]:
    return {**state_of(rank, 2, 0), "more": np.zeros(600, np.int64)}


@pytest.mark.slow
def test_two_meetings_that_wait_for_each_other_end(trial_stores: PoolTracker) -> None:
    """Rank 0 hangs in a save in the background, and goes on to the next one in the foreground; rank
    1 waits for the first. Each sees that the other waits, and neither takes that for progress."""
    store = MemoryStore()
    crew = crew_of(2, store)
    free = threading.Event()
    left = threading.Barrier(3, action=free.set)

    def hang(call: Call) -> None:
        if call.method == "commit" and call.key.startswith("version_1/"):
            free.wait(60)

    crew.ranks[0].before_call = hang

    def work(rank: int) -> Any:
        pending = holdfast.save_async(crew.url(rank, 1), state_of(rank, 2, 1), step=1)
        caught: list[BaseException] = []

        def wait() -> None:
            if rank == 1:
                with pytest.raises(RankFailed) as seen:
                    pending.wait()
                caught.append(seen.value)
            left.wait(60)

        if rank == 1:
            wait()
            return caught[0].rank
        try:
            return crew.save(rank, 2)
        except RankFailed as e:
            return e.rank
        finally:
            left.wait(60)
            with pytest.raises(RankFailed):
                pending.wait()

    killer = threading.Thread(target=lambda: left.wait(60))
    killer.start()
    began = time.monotonic()
    made = crew.group.run(work)
    killer.join()
    assert time.monotonic() - began < 4 * SHORT_TIMEOUTS.stuck
    assert made == [1, 0]
    crew.group.close()
    nothing_left(trial_stores)
