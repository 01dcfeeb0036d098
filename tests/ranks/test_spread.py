"""Several ranks save to a run that spreads its shards."""

import pytest

from limpet.run.policy import EverySteps, KeepLast
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.ranks.test_training import WRITES
from tests.ranks.trainings import TrainingJob, matches_uninterrupted
from tests.spread_stores import shards_in, spread_over


@pytest.mark.filterwarnings("ignore::limpet.errors.InexactResume")
def test_the_shards_of_all_ranks_are_spread():
    with TrainingJob(4, inner=spread_over(MemoryStore(), 16)) as job:
        options = {"save": EverySteps(1), "keep": KeepLast(2)}
        job.run(lambda rank: rank.train(4, **options))
        for trainer in job.ranks[1:]:
            assert {method for method, _ in trainer.calls_without_pin_checks()} == WRITES
    shards = shards_in(job.inner)
    assert len(shards) == 2 * 4 * 2
    assert all(key.startswith("spread-") for key in shards)
    assert len({key.partition("/")[0] for key in shards}) > 4
    run = Run(job.inner)
    assert [s.verify().ok for s in run.snapshots()] == [True, True]
    with TrainingJob(2, inner=job.inner) as again:
        again.run(lambda r: r.train(6, save=EverySteps(1)))
        for rank in again.ranks:
            assert rank.resumed.step == 4
            assert matches_uninterrupted(rank.state, rank.rank, 2, 6)
    assert [v.step for v in run.line()] == [3, 4, 5, 6]
