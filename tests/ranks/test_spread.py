"""Several ranks save to a run that spreads its shards."""

from __future__ import annotations

import pytest

from limpet.errors import PlanError
from limpet.format import names
from limpet.run.policy import EverySteps, KeepLast
from limpet.run.run import Run
from limpet.testing.contract import keys
from tests.ranks.test_training import WRITES
from tests.ranks.trainings import TrainingJob, TrainingRank, matches_uninterrupted


@pytest.mark.filterwarnings("ignore::limpet.errors.RanksChanged")
def test_all_ranks_follow_the_record_that_rank_0_creates() -> None:
    with TrainingJob(4) as job:
        options = {"save": EverySteps(1), "keep": KeepLast(2), "spread": 16}
        job.run(lambda rank: rank.train(4, **options))
        for trainer in job.ranks[1:]:
            assert not [key for method, key in trainer.calls if key == names.SPREAD]
            assert {method for method, _ in trainer.calls_without_pin_checks()} == WRITES
    shards = [k for k in keys(job.inner) if names.parse_attempt(k.rpartition("/")[2]) is not None]
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


def test_ranks_must_agree() -> None:
    def train(rank: TrainingRank) -> None:
        with pytest.raises(PlanError, match="spread="):
            rank.train(1, save=EverySteps(1), spread=8 if rank.rank else 16)

    with TrainingJob(2) as job:
        job.run(train)
    assert keys(job.inner) == []
