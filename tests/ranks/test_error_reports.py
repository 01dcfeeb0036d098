"""How the error of one rank reaches the others: in notes, in warnings, and in the saved version."""

import warnings
from unittest import mock

import pytest

from limpet.errors import NotFound, SaveFailed
from limpet.ranks.group import current_group
from limpet.run.policy import EverySteps, OnException
from limpet.run.run import Run
from tests.fakegroup import FakeGroup
from tests.ranks.trainings import TrainingJob
from tests.waiting import wait_until


def nan_error():
    return ValueError("NaN in the loss")


def connection_error():
    return RuntimeError("Connection closed by peer")


def wait_for_value(job, part, key=""):
    """Wait until a value in the key-value store contains ``part``, under a key that ends so."""
    values = job.group.store.values
    wait_until(lambda: any(k.endswith(key) and part in v for k, v in [*values.items()]))


def wait_for_rank_2(job):
    """Wait until rank 2 has joined the save after its error: it is the one that raised first."""
    wait_for_value(job, b"NaN in the loss", "/first_arrival")


def outcomes(job, errors, step=7):
    """Train up to ``step``, then raise one of the ``errors`` on each rank. Rank 2 raises first."""

    def work(trainer):
        with trainer.make_checkpointer(save=EverySteps(100) | OnException()):
            trainer.train_steps(step)
            if trainer.rank != 2:
                wait_for_rank_2(job)
            if trainer.rank in errors:
                raise errors[trainer.rank]

    return job.outcomes(work)


def test_the_first_error_is_reported_to_the_other_ranks_and_in_the_version():
    with TrainingJob(3) as job, warnings.catch_warnings():
        warnings.simplefilter("error")
        errors_by_rank = outcomes(
            job, {0: connection_error(), 1: connection_error(), 2: nan_error()}
        )
        assert [getattr(e, "__notes__", None) for e in errors_by_rank] == [
            ["Rank 2 raised first: ValueError: NaN in the loss"],
            ["Rank 2 raised first: ValueError: NaN in the loss"],
            None,
        ]
        [version] = Run(job.inner).snapshots()
        assert version.metadata["note"]["error"] == "ValueError: NaN in the loss (rank 2)"
        assert job.leftover_keys() == []


def test_no_rank_gets_a_note_when_all_raise_the_same_error():
    with TrainingJob(3) as job:
        errors_by_rank = outcomes(job, {r: nan_error() for r in range(3)})
        assert [getattr(e, "__notes__", None) for e in errors_by_rank] == [None] * 3
        [version] = Run(job.inner).snapshots()
        assert version.metadata["note"]["error"] == "ValueError: NaN in the loss"


def test_the_first_error_is_reported_when_another_rank_hangs():
    """Rank 0 hangs in its all-reduce. It did not cause the failure, so the notes name rank 2."""
    with (
        TrainingJob(3) as job,
        mock.patch("limpet.training.ending.JOIN_TIMEOUT", 0.5),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(100) | OnException()):
                trainer.train_steps(7)
                if trainer.rank == 0:
                    wait_for_value(job, b"did not join")
                    return
                if trainer.rank == 1:
                    wait_for_rank_2(job)
                raise connection_error() if trainer.rank == 1 else nan_error()

        errors_by_rank = job.outcomes(work)
        [note_1], [note_2] = errors_by_rank[1].__notes__, errors_by_rank[2].__notes__
        expected_note = (
            "In addition, the state after step 7 was not saved: Rank 0 did not join the save after"
            " an exception. Expected it to arrive within 0.5 s, found that it has not arrived."
        )
        assert note_2 == expected_note
        assert note_1 == f"{note_2} Rank 2 raised first: ValueError: NaN in the loss"
        messages = sorted(str(w.message) for w in caught if w.category is SaveFailed)
        assert messages == [
            f"The training ended with RuntimeError. {note_1}",
            f"The training ended with ValueError. {note_2}",
        ]
        assert job.versions == []


@pytest.mark.parametrize(
    "policy",
    [EverySteps(5), pytest.param(EverySteps(5) | OnException(), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("first", ["the one that raises", "the ones that wait"])
def test_ranks_that_wait_for_a_save_raise_the_error_of_the_other_rank(first, policy):
    """Whichever comes first: nobody hears of the operations that differ because of the error."""
    with TrainingJob(3, lockstep=False) as job, warnings.catch_warnings(record=True):

        def work(trainer):
            with trainer.make_checkpointer(save=policy, at_end=True):
                trainer.train_steps(4)
                if trainer.rank == 1:
                    if first == "the ones that wait":
                        wait_for_value(job, b"the save after step 5", "/first_arrival")
                    raise nan_error()
                if first == "the one that raises":
                    wait_for_value(job, b"NaN in the loss", "/first_arrival")
                trainer.train_steps(5)

        with (
            mock.patch("limpet.ranks.agreement.Agreement.raise_at_next_step"),  # it is slower
            mock.patch("limpet.training.ending.JOIN_TIMEOUT", 3.0),
        ):
            errors_by_rank = job.outcomes(work)
        assert [(type(e), str(e)) for e in errors_by_rank] == [(ValueError, "NaN in the loss")] * 3
        for error in errors_by_rank[0], errors_by_rank[2]:
            assert error.__notes__[0].startswith("Raised on rank 1, whose traceback is:")
        assert job.versions == []


@pytest.mark.parametrize(
    "error", [OSError(2, "none", "a\udcff"), NotFound("a\udcff", key="\udcff", keys=("\udcff",))]
)
def test_an_error_with_a_name_that_is_not_utf8_is_reported(error):
    """If the report failed, the other ranks would wait for 600 s."""
    with FakeGroup(2) as group:

        def work(rank):
            collective = current_group().collective("the save")
            try:
                with collective:
                    if rank:
                        raise error
                    collective.gather(rank, int)
            finally:
                collective.close()

        other_error, own_error = group.outcomes(work)
        assert own_error is error
        assert "a\\udcff" in str(other_error)
