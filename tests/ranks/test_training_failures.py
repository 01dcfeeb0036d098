"""Trainings of several ranks: a failure on one rank is raised on all ranks at the same step."""

import re
import threading
import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

import limpet
from limpet.errors import (
    CommitError,
    Denied,
    LimpetError,
    NoSnapshot,
    NoSpace,
    NotFound,
    PlanError,
    RankFailed,
    SaveFailed,
    SkippedVersion,
    StoreError,
    Unavailable,
    UnsavedSteps,
)
from limpet.format.names import Version
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySeconds, EverySteps, KeepLast, OnException
from limpet.run.run import Run
from limpet.threads import no_op
from tests.ranks.trainings import SHORT_TIMEOUTS, TrainingJob, initial_state, matches_uninterrupted
from tests.trainings import flip_bit


def fail_calls(job, rank, error, method, key, times=1):
    """Make the next calls of a ``method`` for keys that contain ``key`` fail on one rank."""
    remaining = [times]

    def fail(called_method, called_key):
        if called_method == method and key in called_key and remaining[0]:
            remaining[0] -= 1
            raise error

    job.set_before_call(rank, fail)


def shard_key(store, version, rank):
    [key] = [
        s.key
        for s in store.list(version)
        if f"shard-{rank:05d}" in s.key and s.key.endswith(".safetensors")
    ]
    return key


def trained_job(size=3, last_step=12):
    """Return a job whose run has the versions 5, 10, and so on."""
    with TrainingJob(size) as job:
        job.train(last_step, save=EverySteps(5))
    return job


def test_training_without_a_resume_into_a_run_with_versions_raises_on_all_ranks():
    inner = trained_job().inner
    with TrainingJob(3, inner) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                trainer.train_steps(3)

        outcomes = job.outcomes(work)
        assert all(isinstance(o, LimpetError) for o in outcomes)
        assert all("holds versions of an earlier training" in str(o) for o in outcomes), outcomes


@pytest.mark.parametrize("reader", [0, 1, 2])
def test_damage_that_one_rank_finds_makes_all_ranks_skip_the_version(reader):
    job = trained_job()
    with TrainingJob(3, job.inner) as job:
        flip_bit(job.inner, shard_key(job.inner, "version_10", reader))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", UnsavedSteps)
            job.train(12, save=EverySteps(5))
        assert [trainer.resumed.step for trainer in job.ranks] == [5] * 3
        assert [w.category for w in caught] == [SkippedVersion]
        assert all(
            matches_uninterrupted(trainer.state, trainer.rank, 3, 12) for trainer in job.ranks
        )
        assert Run(job.inner).listing().branches == [1]
        assert Run(job.inner).line()[-1] == Version(10, 1)
        assert job.leftover_keys() == []


@pytest.mark.parametrize("reader", [0, 2])
@pytest.mark.parametrize("error", [StoreError("Input/output error"), NotFound("No such file")])
def test_a_file_that_one_rank_cannot_read_makes_all_ranks_skip_the_version(reader, error):
    """A training of one process does the same."""
    job = trained_job()
    with TrainingJob(3, job.inner) as job:
        key = shard_key(job.inner, "version_10", reader)
        fail_calls(job, reader, error, "get_range", key, 99)
        with pytest.warns(SkippedVersion, match="version_10 is skipped"):
            job.train(12, save=EverySteps(5))
        assert [trainer.resumed.step for trainer in job.ranks] == [5] * 3
        assert all(
            matches_uninterrupted(trainer.state, trainer.rank, 3, 12) for trainer in job.ranks
        )
        assert Run(job.inner).listing().branches == [1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [Denied("No"), Unavailable("Does not answer")])
@pytest.mark.parametrize("method", ["get", "get_range"])
def test_no_rank_skips_a_version_because_a_store_does_not_respond(rank, error, method):
    job = trained_job()
    with TrainingJob(3, job.inner) as job:
        fail_calls(job, rank, error, method, "version_10/", 99)

        def work(trainer):
            trainer.make_checkpointer(save=EverySteps(5)).resume()

        outcomes = job.outcomes(work)
        assert isinstance(outcomes[rank], type(error))
        for r, outcome in enumerate(outcomes):
            if r != rank:
                assert isinstance(outcome, RankFailed), outcome
                assert outcome.rank == rank
                assert isinstance(outcome.__cause__, type(error))
        assert Run(job.inner).listing().branches == []
        for trainer in job.ranks:
            trainer.store.before = lambda method, key: None

        def resume_and_train(trainer):
            with trainer.ckpt:
                step: int = trainer.ckpt.resume().step
                trainer.train_steps(13)
            return step

        assert job.run(resume_and_train) == [10] * 3
        assert all(
            matches_uninterrupted(trainer.state, trainer.rank, 3, 13) for trainer in job.ranks
        )


@pytest.mark.parametrize("readers", [(0, 0), (2, 2), (1, 2)])
def test_all_ranks_raise_when_all_versions_are_damaged(readers):
    """Afterward, no rank can train, because its live state is not valid."""
    job = trained_job()
    with TrainingJob(3, job.inner) as job:
        for version, reader in zip(("version_5", "version_10"), readers):
            flip_bit(job.inner, shard_key(job.inner, version, reader))

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                with pytest.raises(NoSnapshot) as e:
                    trainer.ckpt.resume()
                with pytest.raises(LimpetError, match=r"The last resume\(\) failed"):
                    trainer.ckpt.step()
                return str(e.value)

        outcomes = job.run(work)
        assert len(set(outcomes)) == 1
        assert Run(job.inner).listing().branches == []


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_can_train_after_a_resume_that_failed_halfway(rank):
    """Rank 2 finds damage in the newest version, and then rank 0 or 1 cannot reach the store.

    It is the second call of ``resume``, so the Checkpointer was ready to train before.
    """
    job = trained_job()
    with TrainingJob(3, job.inner) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                trainer.ckpt.resume()
                trainer.train_steps(11)
                job.wait_for_step(trainer.rank)
                if trainer.rank == 0:
                    flip_bit(job.inner, shard_key(job.inner, "version_10", 2))
                    fail_calls(job, rank, Unavailable("Gone"), "get", "version_5/", 99)
                job.wait_for_step(trainer.rank)
                with pytest.raises(LimpetError):
                    trainer.ckpt.resume()
                with pytest.raises(LimpetError, match=r"The last resume\(\) failed"):
                    trainer.ckpt.step()
            return True

        assert job.run(work) == [True] * 3


@pytest.mark.filterwarnings("ignore::limpet.errors.InexactResume")
def test_resume_at_a_step_and_on_a_branch():
    job = trained_job(last_step=22)
    with TrainingJob(2, job.inner) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5), keep=None):
                resumed = trainer.ckpt.resume(at=10)
                trainer.train_steps(17)
            # ranks 0 and 1 have their own values of "mine"
            assert matches_uninterrupted(trainer.state, trainer.rank, 2, 17) or trainer.rank
            return [resumed.step]

        assert job.run(work) == [[10], [10]]
        assert Run(job.inner).listing().branches == [1]
        assert [str(v) for v in Run(job.inner).line()] == [
            "version_5",
            "version_10",
            "version_15.1",
        ]

        def resume_on_branch(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                return str(trainer.ckpt.resume(at="20").version)

        assert job.run(resume_on_branch) == ["version_20"] * 2
        assert Run(job.inner).listing().branches == [1, 2]

        def resume_at_a_missing_step(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                trainer.ckpt.resume(at=999)

        outcomes = job.outcomes(resume_at_a_missing_step)
        assert {type(o) for o in outcomes} == {NoSnapshot}


@pytest.mark.filterwarnings("ignore::limpet.errors.InexactResume")
def test_resume_starts_from_another_run(tmp_path):
    other, own = str(tmp_path / "other"), str(tmp_path / "own")
    with TrainingJob(3) as job:

        def train_other(trainer):
            trainer.store = other
            trainer.train(12, save=EverySteps(5))

        job.run(train_other)
    with TrainingJob(2) as job:

        def work(trainer):
            trainer.store = own
            with trainer.make_checkpointer(save=EverySteps(5)):
                resumed = trainer.ckpt.resume(start=f"{other}@latest")
                trainer.train_steps(16)
            return resumed.step, trainer.ckpt.current_step

        assert job.run(work) == [(10, 16)] * 2
        assert job.run(work) == [(15, 16)] * 2  # its own from now on
        assert Run(own).latest().metadata["note"]["started_from"]["url"].endswith("version_10")

        def start_partly(trainer):
            trainer.store = own + "2"
            with trainer.make_checkpointer(save=EverySteps(5)):
                trainer.ckpt.resume(start=f"{other}@5", keys="weights")
                return trainer.ckpt.current_step, float(trainer.state["same"][0])

        assert job.run(start_partly) == [(0, 0.0)] * 2

        def start_at_a_missing_step(trainer):
            trainer.store = own + "3"
            with trainer.make_checkpointer(save=EverySteps(5)):
                trainer.ckpt.resume(start=f"{other}@7")

        outcomes = job.outcomes(start_at_a_missing_step)
        assert {type(o) for o in outcomes} == {NotFound}, outcomes


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_different_state_on_one_rank_raises_on_all_ranks(rank):
    job = trained_job()
    with TrainingJob(3, job.inner) as job:

        def work(trainer):
            state = initial_state(trainer.rank, 3)
            if trainer.rank == rank:
                state["more"] = 1.0
            trainer.make_checkpointer(save=EverySteps(5), state=state).resume()

        outcomes = job.outcomes(work)
        assert all(isinstance(o, PlanError) for o in outcomes), outcomes
        assert all("more" in str(o) for o in outcomes)


CALLS = [("put", ".safetensors"), ("commit", ".safetensors"), ("put_if_absent", "index")]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("method", "key"), CALLS)
def test_a_failed_save_on_one_rank_raises_on_all_ranks(rank, method, key):
    """All ranks raise at the same step, when the next save is due. Then training continues."""
    with TrainingJob(3) as job:
        fail_calls(job, rank, NoSpace("The disk is full", key="k"), method, key)

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                trainer.ckpt.resume()
                with pytest.raises((NoSpace, RankFailed), match="The disk is full") as e:
                    trainer.train_steps(20)
                step = trainer.ckpt.current_step
                assert trainer.ckpt.statistics()["failures"] == 1
                trainer.train_steps(18)
                return step, e.value

        outcomes = job.run(work)
        assert [step for step, _ in outcomes] == [10] * 3
        for r, (_, error) in enumerate(outcomes):
            if r == rank:
                assert type(error) is NoSpace
            else:
                assert (type(error), error.rank) == (RankFailed, rank)
                assert isinstance(error.__cause__, NoSpace)
        assert job.versions == [11, 15]
        assert job.leftover_keys() == []


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failed_save_is_a_warning_with_on_error_warn(rank):
    with TrainingJob(3) as job:
        fail_calls(job, rank, NoSpace("The disk is full"), "put", ".safetensors")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", UnsavedSteps)
            job.train(17, save=EverySteps(5), on_error="warn")
        assert [w.category for w in caught] == [SaveFailed] * 3
        assert all("NOTHING WAS SAVED" in str(w.message) for w in caught)
        assert {w.filename for w in caught} == {
            __file__.replace("test_training_failures", "trainings")
        }
        assert job.versions == [10, 15]
        assert all(
            matches_uninterrupted(trainer.state, trainer.rank, 3, 17) for trainer in job.ranks
        )


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_failed_retention_is_reported_on_all_ranks(on_error):
    with TrainingJob(3) as job:
        fail_calls(job, 0, Denied("You may not delete"), "delete", "version_5/manifest.json")

        def work(trainer):
            options: Any = {"save": EverySteps(5), "keep": KeepLast(1), "on_error": on_error}
            with trainer.make_checkpointer(**options):
                trainer.ckpt.resume()
                if on_error == "warn":
                    with pytest.warns() if trainer.rank < 0 else warnings.catch_warnings():
                        trainer.train_steps(22)
                    return None
                with pytest.raises(LimpetError, match="You may not delete") as e:
                    trainer.train_steps(22)
                assert trainer.ckpt.current_step == 15
                trainer.train_steps(22)
                return e.value.committed, str(e.value)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", UnsavedSteps)
            outcomes = job.run(work)
        if on_error == "warn":
            assert [w.category for w in caught] == [SaveFailed] * 3
            assert all("old versions could not be deleted" in str(w.message) for w in caught)
            assert not any("nothing was committed" in str(w.message) for w in caught)
        else:
            assert {committed for committed, _ in outcomes} == {"version_10"}
            assert all("version_10 was saved" in message for _, message in outcomes)
        assert job.versions == [20]  # a later retention deletes the remaining versions


def test_a_save_with_an_unknown_outcome_is_found_when_it_is_repeated():
    """The manifest exists, but the response of the store was lost."""
    with TrainingJob(3) as job:
        lost = [Unavailable("No answer")]

        def lose(method, key):
            if method == "put_if_absent" and key.endswith("manifest.json") and lost:
                raise lost.pop()

        job.ranks[0].store.after = lose

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(100)):
                trainer.train_steps(3)
                with pytest.raises((Unavailable, RankFailed)) as e:
                    trainer.ckpt.save()
                found = trainer.ckpt.save()
                trainer.train_steps(5)
                return (
                    e.value.outcome,
                    found.step,
                    reader_of(found).digest,
                    trainer.ckpt.save().step,
                )

        outcomes = job.run(work)
        assert len(set(outcomes)) == 1
        assert (outcomes[0][0], outcomes[0][1], outcomes[0][3]) == ("unknown", 3, 5)
        assert job.versions == [3, 5]


def test_all_ranks_raise_at_once_when_one_does_not_resume():
    with TrainingJob(3, lockstep=False) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                if trainer.rank != 1:
                    trainer.ckpt.resume()
                trainer.train_steps(3)

        began = time.monotonic()
        outcomes = job.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.silent
        assert all(isinstance(o, RankFailed) for o in outcomes), outcomes
        assert all("run different operations at the same time" in str(o) for o in outcomes)


def train_and_raise(trainer, step, ranks, error, before_raise=no_op, **options):
    """Train up to ``step``, and then raise in the middle of the next step on some ranks."""
    policy = EverySteps(100) | OnException()
    with trainer.make_checkpointer(save=policy, **options):
        trainer.train_steps(step)
        trainer.state["same"] += 1 if trainer.rank in ranks else 0
        if trainer.rank in ranks:
            before_raise()
            raise error
        trainer.train_steps(step + 3)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_state_before_the_step_is_saved_when_all_ranks_raise(kind):
    with TrainingJob(3) as job, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", UnsavedSteps)
        outcomes = job.outcomes(lambda trainer: train_and_raise(trainer, 7, (0, 1, 2), kind("NaN")))
        assert [type(o) for o in outcomes] == [kind] * 3
        assert [getattr(o, "__notes__", None) for o in outcomes] == [None] * 3
        [snapshot] = Run(job.inner).snapshots()
        assert (snapshot.step, snapshot.metadata["reason"]) == (7, "exception")
        job.train(9, save=EverySteps(5))
        assert all(
            matches_uninterrupted(trainer.state, trainer.rank, 3, 9) for trainer in job.ranks
        )


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_nothing_is_saved_when_one_rank_raises_and_a_note_says_so(victim):
    """The other ranks wait in an all-reduce that never ends, or are ended too."""
    with TrainingJob(3) as job, mock.patch("limpet.training.ending.JOIN_TIMEOUT", 1.0):
        began = time.monotonic()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            outcomes = job.outcomes(
                lambda trainer: train_and_raise(trainer, 7, (victim,), ValueError("NaN"))
            )
        assert time.monotonic() - began < 6
        assert isinstance(outcomes[victim], ValueError)
        [note] = outcomes[victim].__notes__
        assert "the state after step 7 was not saved" in note
        assert all(isinstance(o, BaseException) for o in outcomes)
        assert job.versions == []


def test_nothing_is_saved_when_ranks_raise_in_different_steps():
    all_have_trained = threading.Barrier(3, timeout=20)
    with TrainingJob(3, lockstep=False) as job, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        outcomes = job.outcomes(
            lambda trainer: train_and_raise(
                trainer,
                7 + (trainer.rank == 2),
                (0, 1, 2),
                ValueError("NaN"),
                # or a rank would raise the error of another one in an earlier step
                all_have_trained.wait,
            )
        )
        assert [type(o) for o in outcomes] == [ValueError] * 3
        for outcome in outcomes:  # a rank may raise the error of another one in an earlier step
            note = outcome.__notes__[-1]
            assert "The ranks did not raise in the same step" in note
            assert re.search(r"found step \d on rank [012]", note)
        assert job.versions == []


@pytest.mark.slow
def test_nothing_is_saved_when_one_rank_has_changed_its_parameters():
    """Rank 1 raises after its optimizer has stepped. No rank saves, and no rank hangs."""
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer takes seconds, because of its imports
    with TrainingJob(2) as job, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")

        def work(trainer):
            model = torch.nn.Linear(2, 2)
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(1.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            state = {**initial_state(trainer.rank, 2), "model": model, "optimizer": optimizer}
            with trainer.make_checkpointer(save=EverySteps(100) | OnException(), state=state):
                trainer.train_steps(5)
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                if trainer.rank == 1:
                    optimizer.step()
                raise ValueError("NaN")

        began = time.monotonic()
        outcomes = job.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.stuck
        assert [type(o) for o in outcomes] == [ValueError] * 2
        for outcome in outcomes:
            [note] = outcome.__notes__
            assert "(on rank 1)" in note
        assert job.versions == []


@pytest.mark.slow
def test_the_save_after_an_exception_waits_for_a_slow_save_in_flight():
    """The ranks have 20 s to join, but a save in flight may take longer on one rank."""
    with TrainingJob(2) as job, mock.patch("limpet.training.ending.JOIN_TIMEOUT", 0.5):
        release = threading.Event()

        def hold(method, key):
            if method == "commit" and "version_5/" in key:
                release.wait(20)

        job.set_before_call(1, hold)
        threading.Timer(1.5, release.set).start()

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5) | OnException()):
                trainer.train_steps(7)
                raise ValueError("NaN")

        assert [type(o) for o in job.outcomes(work)] == [ValueError] * 2
        assert job.versions == [5, 7]


def test_a_rank_that_ends_early_does_not_block_the_others_between_saves():
    """The next save would name it."""
    with TrainingJob(3, lockstep=False) as job:

        def work(trainer):
            trainer.train(7 if trainer.rank == 2 else 60, save=EverySeconds(600))
            return trainer.ckpt.current_step

        assert job.run(work) == [60, 60, 7]
        assert job.leftover_keys() == []


@pytest.mark.slow
def test_the_next_save_fails_at_once_when_a_rank_has_ended():
    with TrainingJob(3, lockstep=False) as job:

        def work(trainer):
            try:
                trainer.train(7 if trainer.rank == 2 else 60, save=EverySteps(5))
            finally:
                if trainer.rank == 2:
                    job.group.groups[2].kv.close()  # like the end of its process
            return trainer.ckpt.current_step

        began = time.monotonic()
        outcomes = job.outcomes(work)
        assert time.monotonic() - began < SHORT_TIMEOUTS.stuck
        assert outcomes[2] == 7
        for outcome in outcomes[:2]:
            assert isinstance(outcome, RankFailed)
            assert outcome.rank == 2
        assert job.versions == [5]


def test_a_base_version_that_one_rank_cannot_read_raises_on_all_ranks():
    """The other ranks do not wait for the rank that cannot read the base version."""
    with TrainingJob(3) as job:
        fail_calls(job, 2, Unavailable("Gone"), "get", "version_5/")

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5), incremental=True):
                with pytest.raises(CommitError if trainer.rank != 2 else Unavailable, match="Gone"):
                    trainer.train_steps(22)
                step = trainer.ckpt.current_step
                trainer.train_steps(22)
            return step

        began = time.monotonic()
        assert job.run(work) == [15] * 3
        assert time.monotonic() - began < SHORT_TIMEOUTS.stuck
        assert job.versions == [5, 16, 20]


@pytest.mark.slow
def test_a_training_with_overlap_resumes_identically():
    with TrainingJob(2) as job:

        def work(trainer):
            torch.manual_seed(0)
            model = torch.nn.Linear(30, 30)
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(1.0)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            progress = limpet.Progress()
            state = {"model": model, "optimizer": optimizer, "progress": progress}
            with limpet.Checkpointer(
                trainer.store, state, save=EverySteps(3), at_end=False, overlap=True
            ) as ckpt:
                ckpt.resume()
                while progress.step < 10:
                    job.wait_for_step(trainer.rank)
                    for p in model.parameters():
                        p.grad = torch.full_like(p, progress.step + 1.0)
                    optimizer.step()
                    ckpt.step()
            return model.weight.detach().clone()

        first = job.run(work)
        assert torch.equal(*first)
        assert job.versions == [3, 6, 9]
        assert torch.equal(*job.run(work))
