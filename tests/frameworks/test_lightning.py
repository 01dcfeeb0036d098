"""Trainings with Lightning that are killed and resumed end with the bits of undisturbed ones."""

from signal import SIGTERM

import pytest

from tests.frameworks import lightning_trainings as trainings
from tests.frameworks.harness import Kill, Process


@pytest.fixture(scope="module")
def process():
    process = Process("tests.frameworks.lightning_trainings")
    yield process
    process.close()


KILLS = {
    "plain": [Kill(3), Kill(5), Kill(7), Kill(mark="epoch 2"), Kill(15)],
    "validation": [
        Kill(3), Kill(5), Kill(mark="before validation after step 10"),
        Kill(mark="validation after step 15"), Kill(15),
    ],
    "every epoch": [Kill(6), Kill(mark="epoch 2")],
    "every third step": [Kill(5), Kill(mark="before validation after step 10"), Kill(14)],
    "workers": [Kill(3), Kill(5)],
    "accumulation": [Kill(1), Kill(2), Kill(mark="validation after step 4")],
    "accumulation by epoch": [Kill(4), Kill(6), Kill(8)],
    "validation in mid-epoch": [
        Kill(2), Kill(mark="before validation after step 4"), Kill(5),
        Kill(mark="validation after step 7"),
    ],
    "validation between the batches of a step": [
        Kill(1), Kill(mark="before validation after step 2"), Kill(3)
    ],
    "validation by batches": [Kill(4), Kill(5), Kill(mark="validation after step 8")],
    "validation by epochs": [Kill(3), Kill(12), Kill(mark="epoch 3")],
    "plateau": [Kill(3), Kill(5), Kill(8), Kill(10)],
    "plateau of a mean": [Kill(3), Kill(5), Kill(8)],
    "early stopping": [Kill(3), Kill(4)],
    "early stopping at an epoch": [Kill(3), Kill(5), Kill(10), Kill(13)],
    "early stopping of Limpet": [Kill(3), Kill(5)],
    "manual": [Kill(2), Kill(8)],
    "manual, carried": [Kill(4), Kill(6), Kill(8)],
    "dict": [Kill(2), Kill(4), Kill(5), Kill(7)],
    "shortest": [Kill(2), Kill(3), Kill(4)],
    "limited": [Kill(2), Kill(3), Kill(4)],
    "maximum steps": [Kill(3), Kill(10), Kill(12)],
    "overfitted": [Kill(1), Kill(2)],
    "skipping": [Kill(1), Kill(2), Kill(4)],
    "one cycle": [Kill(3), Kill(5)],
    "reloaded": [Kill(2), Kill(3), Kill(8)],
    "scaler": [Kill(3), Kill(5)],
    "callback": [Kill(3), Kill(5)],
    "average": [Kill(3), Kill(5)],
    "stream": [Kill(3), Kill(5)],
    "sampler": [Kill(3), Kill(5)],
}  # fmt: skip


@pytest.mark.parametrize("setup", KILLS)
def test_a_killed_training_is_exact(setup, process, memory):
    # after skipped batches, Lightning counts one more, for the axis of its loggers
    ignore = ["_batches_that_stepped"] if setup == "skipping" else []
    process.check_exact(trainings.train, memory, kills=KILLS[setup], setup=setup, ignore=ignore)


def test_two_ranks_whose_buffers_differ_are_exact(process, memory):
    kills = [Kill(2), Kill(3), Kill(4), Kill(5, signal=SIGTERM)]
    process.check_exact(trainings.train_ranks, memory, ranks=2, kills=kills)


def test_after_sigterm_the_training_saves_and_exits_and_resumes_exactly(process, memory):
    places = [Kill(2), Kill(5), Kill(mark="validation after step 10"), Kill(12)]
    kills = [kill._replace(signal=SIGTERM) for kill in places]
    run = process.check_exact(trainings.train, memory, setup="every epoch", kills=kills)[1]
    assert [s.metadata["reason"] for s in run.snapshots()].count("preemption") == 4


def test_a_damaged_version_is_skipped(process, memory):
    """Lightning#21431: a truncated file ends each start. Here, the version before is loaded."""
    kills = [Kill(4, damage="truncate"), Kill(8, damage="flip"), Kill(12, damage="truncate")]
    process.check_exact(trainings.train, memory, setup="validation", kills=kills)
