"""The restore ladder of several ranks: rank 0 decides, and all ranks do the same."""

import warnings

import pytest

from limpet.errors import NoProgress, RankFailed, SkippedVersion, Unavailable
from limpet.format.names import Version
from limpet.notices import exit_status
from limpet.notices.exit_status import GIVE_UP, Status
from limpet.run.policy import AtEnd, EverySteps
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.ranks.trainings import TrainingJob, matches_uninterrupted

SIZE = 3


@pytest.fixture
def statuses(tmp_path, monkeypatch):
    """Be under ``limpet run``, with the statuses of ranks that are threads of one process."""
    found: list[Status] = []
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path))
    monkeypatch.setattr(exit_status, "write_status", lambda _, status: found.append(status))
    return found


class Cluster:
    """Ranks that resume, train, and die."""

    def __init__(self):
        self.store = MemoryStore()
        self.messages: list[str] = []

    def die_at(self, last_step):
        """Return the steps that the ranks resumed from, or their exceptions."""

        def work(trainer):
            ckpt = trainer.make_checkpointer(save=EverySteps(10))
            try:
                found = ckpt.resume()
                step = 0 if found is None else found.step
                assert matches_uninterrupted(trainer.state, trainer.rank, SIZE, step)
                trainer.train_steps(last_step)
                ckpt._saver.wait()
                return step
            finally:
                ckpt._ending.ladder._key = ""
                ckpt._release()

        job = TrainingJob(SIZE, self.store)
        with job, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = job.outcomes(work)
        self.messages = [str(w.message) for w in caught if w.category is SkippedVersion]
        return results

    @property
    def rungs(self):
        return [int(s.key[8]) for s in self.store.list("") if s.key.startswith("restart-")]


def test_all_ranks_go_back_together_and_leave_with_93_together(statuses, capsys):
    cluster = Cluster()
    assert cluster.die_at(25) == [0] * SIZE
    for _ in range(3):
        assert cluster.die_at(25) == [20] * SIZE
    assert cluster.rungs == [0, 0, 0], "one record for each restart, not for each rank"
    assert cluster.die_at(19) == [10] * SIZE
    assert len(cluster.messages) == 2, "rank 0 warns"
    assert Run(cluster.store).branch() == 1
    assert cluster.die_at(25) == [10] * SIZE
    assert cluster.die_at(25) == [20] * SIZE
    assert Run(cluster.store).line() == [Version(10), Version(20, 1)]

    left = cluster.die_at(25)
    assert [type(e) for e in left] == [NoProgress] * SIZE
    assert {e.code for e in left} == {0}
    assert len({e.reason for e in left}) == 1
    assert sorted(s.rank for s in statuses) == [*range(SIZE)]
    assert {s.code for s in statuses} == {GIVE_UP}
    assert capsys.readouterr().err.count("6 restarts have made no progress beyond step 20") == 1


def test_the_record_is_removed_once_all_ranks_have_ended_well(statuses):
    cluster = Cluster()
    for _ in range(5):
        job = TrainingJob(SIZE, cluster.store)
        with job:
            job.train(15, save=EverySteps(10) | AtEnd())
            assert job.leftover_keys() == []
        assert cluster.rungs == []


def test_a_record_that_cannot_be_written_when_going_back_fails_on_all_ranks(statuses, monkeypatch):
    cluster = Cluster()
    for _ in range(4):
        cluster.die_at(25)
    put = cluster.store.put_if_absent

    def fail(key, data):
        if key.startswith("restart-2"):
            raise Unavailable("The store does not answer")
        return put(key, data)

    monkeypatch.setattr(cluster.store, "put_if_absent", fail)
    errors = cluster.die_at(25)
    assert [type(e) for e in errors] == [Unavailable, *[RankFailed] * (SIZE - 1)]
    assert Run(cluster.store).branch() == 0
    monkeypatch.undo()
    assert statuses == []
