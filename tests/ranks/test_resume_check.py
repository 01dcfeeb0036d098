"""Several ranks compare the live state after a resume with the version; rank 0 reports."""

from contextlib import contextmanager
from typing import Any

import pytest

import limpet
from limpet.run.policy import EverySteps
from limpet.training import resume_check
from tests.ranks.trainings import TrainingJob


@contextmanager
def reports():
    found: list[tuple[str, dict[str, Any]]] = []

    def sink(name, fields):
        if name.startswith("resume_"):
            found.append((name, fields))

    with limpet.attach(sink):
        yield found


def resume(trainer):
    with trainer.make_checkpointer() as ckpt:
        ckpt.resume(check=True)


@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_together_compare_all_bytes(size):
    with TrainingJob(size) as job:
        job.train(5, save=EverySteps(5))
        with reports() as found:
            job.run(resume)
        ((name, fields),) = found
        assert name == "resume_checked"
        assert fields["bytes"] > 0
        assert job.leftover_keys() == []


def change(flat):
    (leaf,) = (leaf for leaf in flat.leaves if leaf.key == "mine/1")
    leaf.source[0] = 77


def fail(flat):
    raise OSError("boom")


@pytest.mark.parametrize(
    ("disturb", "differing"),
    [
        (change, "mine/1"),
        (fail, "the state of rank 1, which cannot be compared: OSError: boom"),
    ],
)
def test_a_difference_or_an_error_of_one_rank_is_reported_by_rank_0_and_ends_no_resume(
    monkeypatch, disturb, differing
):
    compare = resume_check._compare

    def disturbed(snapshot, flat, rank, advance):
        if rank == 1:
            disturb(flat)
        return compare(snapshot, flat, rank, advance)

    with TrainingJob(2) as job:
        job.train(5, save=EverySteps(5))
        monkeypatch.setattr(resume_check, "_compare", disturbed)
        with reports() as found:
            job.run(resume)
    ((name, fields),) = found
    assert (name, fields["differing"]) == ("resume_differs", [differing])


@pytest.mark.filterwarnings("ignore::limpet.errors.InexactResume")
def test_other_ranks_compare_what_they_can():
    """With fewer ranks, per-rank values of the others are not loaded, and so not compared."""
    with TrainingJob(3) as job:
        job.train(5, save=EverySteps(5))
        store = job.inner
    with TrainingJob(2, store) as job, reports() as found:
        job.run(resume)
    ((name, fields),) = found
    assert name == "resume_checked"
    assert fields["bytes"] > 0
