"""The end of a training of several ranks: all ranks save the last step, or none does."""

import sys
import time
import warnings

import pytest

from limpet.errors import RankFailed, UnsavedSteps
from limpet.ranks.error_report import (
    decode_error,
    decode_raised,
    encode_error,
    encode_raised,
    format_with_notes,
)
from limpet.run.policy import AtEnd, EverySteps, OnException, OnPreemption
from limpet.run.run import Run
from tests.ranks.trainings import SHORT_TIMEOUTS, TrainingJob, matches_uninterrupted
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("policy", [None, AtEnd(), EverySteps(5)])
def test_all_ranks_save_the_last_step(policy):
    with TrainingJob(3) as job:
        job.train(7, save=policy, at_end=True)
        assert job.versions[-1] == 7
        assert Run(job.inner).snapshots()[-1].metadata["reason"] == "end"
        job.train(7, save=policy, at_end=True)  # only resumes
        assert [trainer.resumed.step for trainer in job.ranks] == [7] * 3
        job.train(9, save=policy, at_end=True)
        assert job.versions[-1] == 9
        assert all(
            matches_uninterrupted(trainer.state, trainer.rank, 3, 9) for trainer in job.ranks
        )
        assert job.leftover_keys() == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"save": EverySteps(5), "at_end": False}, [5]), ({"save": OnPreemption()}, [])],
)
def test_without_a_save_at_the_end_the_ranks_do_not_wait_for_one_another(options, expected):
    """They may even end at different steps, as nothing is saved."""
    with TrainingJob(3, lockstep=False) as job, warnings.catch_warnings():
        warnings.simplefilter("error")

        def work(trainer):
            with trainer.make_checkpointer(**options):
                trainer.train_steps(7 + trainer.rank)

        assert job.outcomes(work) == [None] * 3
        assert job.versions == expected


def test_ranks_whose_last_step_is_saved_do_not_wait_for_one_another():
    with TrainingJob(3) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5) | AtEnd()):
                trainer.train_steps(5)
                trainer.ckpt.wait()
                if trainer.rank == 1:  # writes a report, for example
                    others = [job.ranks[0].ckpt, job.ranks[2].ckpt]
                    wait_until(lambda: all(ckpt._lifecycle.is_closed for ckpt in others))

        job.run(work)
        assert job.versions == [5]
        assert job.leftover_keys() == []


def test_a_rank_whose_last_step_is_saved_may_end_after_the_host_of_the_key_value_store():
    """Rank 0 often hosts it, and its process may end first."""
    with TrainingJob(2) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5), at_end=True):
                trainer.train_steps(5)
                trainer.ckpt.wait()
                if trainer.rank == 1:
                    wait_until(lambda: job.ranks[0].ckpt._lifecycle.is_closed)
                    job.group.views[1].disconnect()

        assert job.outcomes(work) == [None] * 2
        assert job.versions == [5]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("policy", [AtEnd(), AtEnd() | OnException()])
@pytest.mark.parametrize("block", [True, False])
def test_nothing_is_saved_when_one_rank_raises_while_the_others_end(victim, policy, block):
    if not block and policy.on_exception:
        pytest.skip("OnException requires a with block")
    with TrainingJob(3) as job, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")

        def train(trainer):
            trainer.train_steps(7)
            if trainer.rank == victim:
                raise ValueError("NaN in the loss")

        def work(trainer):
            ckpt = trainer.make_checkpointer(save=policy)
            if block:
                with ckpt:
                    train(trainer)
            else:
                try:
                    train(trainer)
                finally:
                    ckpt.close()

        began = time.monotonic()
        outcomes = job.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.silent
        assert isinstance(outcomes[victim], ValueError)
        for rank in {0, 1, 2} - {victim}:
            error = outcomes[rank]  # the wait at the end, or the training, raises it
            assert isinstance(error, RankFailed | ValueError), outcomes
            text = format_with_notes(error)
            assert f"ank {victim}" in text
            assert "NaN in the loss" in text
        assert job.versions == []
        assert job.leftover_keys() == []


def test_an_error_that_another_rank_raises_again_names_its_first_rank():
    raised = decode_raised(encode_raised(ValueError("NaN in the loss"), 0))
    error = decode_error(encode_error(raised, 2, "save", commit_begun=False), "save")
    assert str(error).startswith("Rank 0 failed during save")
    assert error.fields["rank"] == 0


@pytest.mark.parametrize(("early", "saved"), [(0, 7), (2, 7), (0, 5), (2, 5)])
def test_nothing_is_saved_when_the_ranks_end_at_different_steps(early, saved):
    """With ``saved`` at 5, the last step of the early rank is saved, and that of the others not."""
    with TrainingJob(3, lockstep=False) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5) | AtEnd()):
                trainer.train_steps(saved)
                trainer.ckpt.wait()
                if trainer.rank != early:
                    trainer.train_steps(saved + 1)

        began = time.monotonic()
        outcomes = job.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.silent
        late = [o for rank, o in enumerate(outcomes) if rank != early]
        assert all(isinstance(o, RankFailed) for o in late), outcomes
        assert all(f"step {saved}" in str(o) and f"rank {early}" in str(o).lower() for o in late)
        assert (outcomes[early] is None) == (saved == 5)
        assert job.versions == [5]
        assert job.leftover_keys() == []


@pytest.mark.slow
def test_a_rank_that_dies_before_the_end_does_not_hang_the_others():
    with TrainingJob(3) as job:

        def work(trainer):
            ckpt = trainer.make_checkpointer(save=AtEnd())
            trainer.train_steps(7)
            if trainer.rank == 1:
                job.group.groups[1].kv.close()  # like the end of its process
            else:
                ckpt.close()

        began = time.monotonic()
        outcomes = job.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.stuck
        assert [type(o) for o in outcomes] == [RankFailed, type(None), RankFailed]
        assert job.versions == []
        job.ranks[1].ckpt._agreement.close()
        job.ranks[1].ckpt._preemption.close()


def test_only_rank_0_warns_of_unsaved_steps():
    with TrainingJob(3) as job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                trainer.train_steps(7)
                sys.exit(0)

        assert [type(outcome) for outcome in job.outcomes(work)] == [SystemExit] * 3
        [warning] = caught
        assert warning.category is UnsavedSteps
        assert "Steps 6 to 7" in str(warning.message)
        assert job.leftover_keys() == []
