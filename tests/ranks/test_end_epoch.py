"""All ranks end their epochs together, and save the same steps."""

import time

import pytest

import limpet
from limpet.run.policy import EveryEpoch, EverySteps, StopWhen
from limpet.run.run import Run
from tests.ranks.trainings import TrainingJob, initial_state

pytestmark = pytest.mark.filterwarnings("error", "ignore::limpet.errors.UnsavedSteps")


def state_of(trainer):
    return {**initial_state(trainer.rank, 2), "progress": limpet.Progress()}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(EveryEpoch(), [3, 6, 9]), (EverySteps(6) | EveryEpoch(), [3, 6, 9]), (EveryEpoch(2), [6])],
)
def test_all_ranks_save_at_the_end_of_an_epoch(policy, expected):
    with TrainingJob(2) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=policy, state=state_of(trainer)) as ckpt:
                for _ in range(3):
                    for _ in range(3):
                        ckpt.step({"loss": 1.0})
                    ckpt.end_epoch({"val": 1.0 + trainer.rank})
                ckpt.wait()
            return int(trainer.state["progress"].epoch)

        assert job.run(work) == [3, 3]
        assert job.versions == expected
        run = Run(job.inner)
        assert [run.metrics(v)["val"] for v in run.line()] == [1.0] * len(expected)  # of rank 0
        assert job.leftover_keys() == []


def test_all_ranks_stop_after_the_metrics_of_an_epoch():
    with TrainingJob(2) as job:

        def work(trainer):
            stop = StopWhen("val", patience=1)
            with trainer.make_checkpointer(
                save=EverySteps(100), stop=stop, state=state_of(trainer)
            ) as ckpt:
                end = time.monotonic() + 20
                while not ckpt.should_stop and time.monotonic() < end:
                    for _ in range(3):
                        ckpt.step({"loss": 1.0})
                    ckpt.end_epoch({"val": 1.0})
            return ckpt.should_stop

        assert job.run(work) == [True, True]
        steps = {trainer.ckpt.current_step for trainer in job.ranks}
        assert len(steps) == 1


@pytest.mark.parametrize("stop", [2, 3, None])
def test_all_ranks_make_the_epochs_that_remain(stop):
    """They leave within the second epoch, in its evaluation, or never, and start again."""
    with TrainingJob(2) as job:
        seen: dict[int, list[int]] = {0: [], 1: []}

        def work(trainer, stop=stop):
            place = {"rank": trainer.rank, "ranks": 2}
            loader = limpet.DataLoader(range(6), **place, total_batch_size=2, shuffle=True, seed=0)
            state = {**state_of(trainer), "loader": loader}
            steps = EverySteps(1) | EveryEpoch()
            with trainer.make_checkpointer(save=steps, state=state) as ckpt:
                for epoch in ckpt.epochs(3):
                    for _ in loader:
                        seen[trainer.rank].append(epoch)
                        ckpt.step({"loss": 1.0})
                        if epoch == 1 and loader.batch + 1 == stop:
                            return
                    ckpt.metrics({"val": 1.0 + trainer.rank})

        job.run(work)
        job.run(lambda trainer: work(trainer, None))
        job.run(lambda trainer: work(trainer, None))
        assert seen == {rank: [0, 0, 0, 1, 1, 1, 2, 2, 2] for rank in (0, 1)}
        assert job.versions == [*range(1, 10)]
        assert [Run(job.inner).metrics(n).get("val") for n in (3, 6, 9)] == [1.0] * 3
        assert job.leftover_keys() == []
