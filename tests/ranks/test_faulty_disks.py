"""Each call of one rank to its file system fails in turn.

All ranks raise and nothing is committed, or all ranks return and the version is complete.
"""

import errno

import pytest

from limpet.errors import CommitError, LimpetError, RankFailed, StoreError
from limpet.format.names import Version
from limpet.loading.snapshot import reader_of
from limpet.run.run import Run
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.testing.faults import Fault, FaultFs
from tests.ranks.faults import ThreadedJob, assert_versions_intact
from tests.ranks.test_commit import assert_nothing_left

SIZE = 2


class UnsyncedFs(Fs):
    """A file system without fsync. These tests do not cut the power."""

    def fsync(self, fd): ...


def make_job(folder, victim, *faults):
    faulty = FaultFs(UnsyncedFs(), *faults)
    stores = [LocalStore(folder, fs=faulty if r == victim else UnsyncedFs()) for r in range(SIZE)]
    return ThreadedJob(SIZE, stores), faulty


def check_save(job, faulty, victim, folder):
    """Save with the faults and check that the ranks agree, then save without them."""
    outcomes = job.group.outcomes(lambda rank: job.save(rank, 1))
    faulty.faults.clear()
    store = LocalStore(folder)
    committed = any(s.key == "version_1/manifest.json" for s in store.list(""))
    victim_outcome = outcomes[victim]
    failed = [isinstance(o, BaseException) for o in outcomes]
    assert len(set(failed)) == 1, outcomes
    if not failed[0]:
        assert committed
        assert {reader_of(o).digest for o in outcomes} == {
            reader_of(Run(store).open(Version(1, 0))).digest
        }
    else:
        assert isinstance(victim_outcome, StoreError | CommitError | OSError), victim_outcome
        assert isinstance(outcomes[1 - victim], RankFailed)
        assert outcomes[1 - victim].rank == victim
        assert str(victim_outcome) in str(outcomes[1 - victim])
        reported = {isinstance(o, LimpetError) and o.fields.get("outcome") for o in outcomes}
        assert reported in ({None}, {"unknown"}, {False, None})
        assert not committed or reported == {"unknown"}, outcomes
    step = 2 if committed else 1
    job.group.run(lambda rank: job.save(rank, step))
    assert job.leftover_keys() == []
    job.group.close()
    assert_versions_intact(store, [1, 2][:step])


def inject_all_faults(make_fault, tmp_path):
    """Make every call of each rank fail in turn. Return the number of faults that occurred."""
    fired = 0
    for victim in range(SIZE):
        job, fs = make_job(tmp_path / f"count-{victim}", victim)
        job.group.run(lambda rank, job=job: job.save(rank, 1))
        job.group.close()
        for kind, times in fs.counts.items():
            for occurrence in range(1, times + 1):
                folder = tmp_path / f"{victim}-{kind}-{occurrence}"
                job, faulty = make_job(folder, victim, make_fault(kind, occurrence))
                check_save(job, faulty, victim, folder)
                fired += bool(faulty.fired)
    return fired


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "lost"),
    [(errno.ENOSPC, False), (errno.EIO, True)],
    ids=["ENOSPC", "EIO, and its reply is lost"],
)
def test_the_ranks_agree_when_any_file_system_call_fails(trial_stores, tmp_path, error, lost):
    def make_fault(kind, occurrence):
        return Fault(kind, occurrence, error, lost=lost)

    assert inject_all_faults(make_fault, tmp_path) > 40
    assert_nothing_left(trial_stores)


@pytest.mark.slow
def test_the_ranks_agree_when_the_disk_stays_full(trial_stores, tmp_path):
    def make_fault(kind, occurrence):
        return Fault(kind, occurrence, errno.ENOSPC, lasting=True)

    assert inject_all_faults(make_fault, tmp_path) > 40
    assert_nothing_left(trial_stores)


def test_a_save_without_a_fault_succeeds(trial_stores, tmp_path):
    job, faulty = make_job(tmp_path, 0)
    check_save(job, faulty, 0, tmp_path)
    assert not faulty.fired
    assert_nothing_left(trial_stores)
