"""One call of one rank to its file system fails, whichever: all ranks raise and nothing is there,
or all return and everything is."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import CommitError, HoldfastError, RankFailed, StoreError
from holdfast.format.names import Version
from holdfast.run.run import Run
from holdfast.storage.local import LocalStore
from holdfast.storage.os_calls import Fs
from holdfast.testing.faults import Fault, FaultFs
from tests.crash.conftest import PoolTracker
from tests.ranks.faults import ThreadedJob, assert_versions_intact
from tests.ranks.test_commit import nothing_left

SIZE = 2


class Unsynced(Fs):
    """As no power is cut here, nothing needs to be durable."""

    def fsync(self, fd: int) -> None: ...


def crew_on(folder: Path, victim: int, *faults: Fault) -> tuple[ThreadedJob, FaultFs]:
    faulty = FaultFs(Unsynced(), *faults)
    stores = [LocalStore(folder, fs=faulty if r == victim else Unsynced()) for r in range(SIZE)]
    return ThreadedJob(SIZE, stores), faulty


def check(crew: ThreadedJob, faulty: FaultFs, victim: int, folder: Path) -> None:
    outcomes = crew.group.outcomes(lambda rank: crew.save(rank, 1))
    faulty.faults.clear()
    store = LocalStore(folder)
    there = any(s.key == "version_1/manifest.json" for s in store.list(""))
    mine = outcomes[victim]
    failed = [isinstance(o, BaseException) for o in outcomes]
    assert len(set(failed)) == 1, outcomes
    if not failed[0]:
        assert there
        assert {o.digest for o in outcomes} == {Run(store).open(Version(1, 0)).digest}
    else:
        assert isinstance(mine, StoreError | CommitError | OSError), mine
        assert isinstance(outcomes[1 - victim], RankFailed)
        assert outcomes[1 - victim].rank == victim
        assert str(mine) in str(outcomes[1 - victim])
        unsure = {isinstance(o, HoldfastError) and o.fields.get("outcome") for o in outcomes}
        assert unsure in ({None}, {"unknown"}, {False, None})
        assert not there or unsure == {"unknown"}, outcomes
    step = 2 if there else 1
    crew.group.run(lambda rank: crew.save(rank, step))
    assert crew.leftover_keys() == []
    crew.group.close()
    assert_versions_intact(store, [1, 2][:step])


def every_fault(make: Callable[[str, int], Fault], tmp_path: Path) -> int:
    done = 0
    for victim in range(SIZE):
        crew, counted = crew_on(tmp_path / f"count-{victim}", victim)
        crew.group.run(lambda rank, crew=crew: crew.save(rank, 1))
        crew.group.close()
        for kind, times in counted.counts.items():
            for at in range(1, times + 1):
                folder = tmp_path / f"{victim}-{kind}-{at}"
                crew, faulty = crew_on(folder, victim, make(kind, at))
                check(crew, faulty, victim, folder)
                done += bool(faulty.fired)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["fails", "its reply is lost"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_call_fails(trial_stores: PoolTracker, tmp_path: Path, error: int, lost: bool) -> None:
    def make(kind: str, at: int) -> Fault:
        return Fault(kind, at, error, lost=lost)

    assert every_fault(make, tmp_path) > 40
    nothing_left(trial_stores)


@pytest.mark.slow
def test_the_disk_stays_full(trial_stores: PoolTracker, tmp_path: Path) -> None:
    def make(kind: str, at: int) -> Fault:
        return Fault(kind, at, errno.ENOSPC, lasting=True)

    assert every_fault(make, tmp_path) > 40
    nothing_left(trial_stores)


def test_nothing_is_wrong_without_a_fault(trial_stores: PoolTracker, tmp_path: Path) -> None:
    crew, faulty = crew_on(tmp_path, 0)
    check(crew, faulty, 0, tmp_path)
    assert not faulty.fired
    nothing_left(trial_stores)
