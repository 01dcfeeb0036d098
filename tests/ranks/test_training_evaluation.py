"""Evaluation inside the training of several ranks, which divide the data."""

import threading
from contextlib import contextmanager

import pytest
import torch  # noqa: F401  (before the threads: two that import it at once fail)

import limpet
from limpet.errors import LimpetError, RankFailed
from limpet.format.records import Evaluation, InexactEvaluation
from limpet.loading.snapshot import reader_of
from limpet.notices.notice import Notice
from limpet.run.policy import Continuously, EverySeconds, EverySteps, Never, StopWhen
from limpet.run.run import Run
from limpet.training.training_evaluation import TrainingEvaluation
from tests.ranks.test_training import clocks
from tests.ranks.trainings import TrainingJob, train_step

RECORDS = list(range(23))


class Evaluating:
    """What a rank evaluates: the batches that it got, with the step at which it got each."""

    def __init__(self, trainer, **options):
        self.trainer = trainer
        self.batches: list[tuple[int, list[int]]] = []
        options = {"data": RECORDS, "batch_size": 2, "every": EverySteps(5), **options}
        self.evaluation = TrainingEvaluation(
            trainer.ckpt, None, options.pop("evaluate", self.evaluate), name="val", **options
        )

    def evaluate(self, model, batch):
        self.batches.append((self.trainer.ckpt.current_step, batch.tolist()))
        return {"mean": (batch.sum(), len(batch)), "max": (batch.max(), 1)}

    def train(self, last_step):
        ckpt, job = self.trainer.ckpt, self.trainer.job
        while ckpt.current_step < last_step and not ckpt.should_stop:
            job.wait_for_step(self.trainer.rank)
            self.evaluation.step()
            train_step(self.trainer.state, ckpt.current_step + 1)
            ckpt.step()


@contextmanager
def evaluating(trainer, **options):
    save = options.pop("save", Never())
    preemption = options.pop("preemption", None)
    stop = options.pop("stop", None)
    with trainer.make_checkpointer(save=save, preemption=preemption, stop=stop):
        trainer.ckpt.resume()
        part = Evaluating(trainer, **options)
        with part.evaluation:
            yield part


def records(job, kind):
    run = Run(job.inner)
    return [
        record
        for snapshot in run.snapshots()
        for record in run.catalog.evaluations.read(snapshot.version, reader_of(snapshot).digest).of(
            kind
        )
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("on", ["current", "paused"])
def test_ranks_divide_the_data_and_the_result_is_that_of_one_process(size, on):
    def work(trainer):
        with evaluating(trainer, on=on) as part:
            part.train(8)
        return part.batches, part.evaluation.newest

    with TrainingJob(size) as job:
        results = job.run(work)
        rounds = -(-12 // size)
        for batches, score in results:
            assert len(batches) == 2 * rounds, "no rank takes more than its share"
            assert score.metrics["mean"] == pytest.approx(11.0)
            assert (score.first_step, score.last_step) == (8, 8), "the last step is evaluated, too"
            steps = [step for step, _ in batches]
            assert steps[rounds:] == [8] * rounds
            steps = steps[:rounds]
            assert steps == [
                5 + i if on == "current" and i < 3 else steps[i] for i in range(rounds)
            ]
        assert len({repr(score) for _, score in results}) == 1
        for part in (slice(0, rounds), slice(rounds, None)):
            seen = {r for batches, _ in results for _, batch in batches[part] for r in batch}
            assert seen == {*RECORDS}
        found = records(job, InexactEvaluation if on == "current" else Evaluation)
        assert [record.name for record in found] == ["val"] * 2, "one record each, by one rank"
        assert records(job, Evaluation if on == "current" else InexactEvaluation) == []
        if on == "paused":
            assert job.versions == [5, 8]
            for step in (5, 8):
                assert Run(job.inner).metrics(step)["mean"] == pytest.approx(11.0)


@pytest.mark.parametrize("on", ["current", "paused"])
def test_scores_that_count_stop_all_ranks_at_one_step(on):
    def work(trainer):
        def worse(model, batch):
            return {"loss": (trainer.ckpt.current_step, 1)}

        stop, how = StopWhen("loss", patience=2), {"on": on, "counts": on == "current"}
        with evaluating(trainer, evaluate=worse, stop=stop, every=EverySteps(2), **how) as part:
            part.train(10_000)
        return trainer.ckpt.current_step

    with TrainingJob(2) as job:
        first, second = job.run(work)
        assert first == second < 10_000
        assert job.versions[:3] == ([2, 4, 6] if on == "paused" else [7])
        assert Run(job.inner).ended() == "stopped by " + repr(StopWhen("loss", patience=2))


@pytest.mark.parametrize("every", [EverySeconds(60), Continuously(60)])
def test_the_clock_of_rank_0_starts_an_evaluation_on_all_ranks_at_one_step(every):
    seconds = [0.0]

    def work(trainer):
        with evaluating(trainer, on="paused", every=every, batch_size=23) as part:
            part.train(3)
            if trainer.rank == 0:
                seconds[0] = 100.0
            while not part.batches:
                assert trainer.ckpt.current_step < 20_000
                part.train(trainer.ckpt.current_step + 1)
        return [step for step, _ in part.batches]

    with clocks(lambda rank: seconds[0] if rank == 0 else 1e9 * rank), TrainingJob(2) as job:
        first, second = job.run(work)
    assert first == second
    assert len(first) == 2, "and that of the last step"


@pytest.mark.parametrize("on", ["current", "paused"])
def test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_recorded(on):
    def work(trainer):
        def fail(model, batch):
            if 7 in batch:
                raise ZeroDivisionError("one bad batch")
            return {"n": (1, 1)}

        message = r"on rank 1, records 6 to 7 at step "
        at_end = pytest.raises(LimpetError, match=message)
        with at_end, evaluating(trainer, on=on, evaluate=fail) as part:
            with pytest.raises(LimpetError, match=message + "[56]") as e:
                part.train(30)
            part.train(trainer.ckpt.current_step + 1)
        return str(e.value)

    with TrainingJob(2) as job:
        first, second = job.run(work)
        assert first == second
        assert records(job, Evaluation) == records(job, InexactEvaluation) == []


def test_a_rank_that_dies_ends_the_evaluation_of_the_others_in_a_bounded_time():
    def work(trainer):
        def die(model, batch):
            if trainer.rank == 1:
                job.group.views[1].disconnect()
                raise KeyboardInterrupt
            return {"n": (1, 1)}

        with evaluating(trainer, on="paused", evaluate=die) as part:
            part.train(30)

    with TrainingJob(2) as job:
        first, second = job.outcomes(work)
        assert isinstance(second, KeyboardInterrupt)
        assert isinstance(first, RankFailed | LimpetError), first
        assert records(job, Evaluation) == []


def test_ranks_with_different_data_are_refused():
    def work(trainer):
        with evaluating(trainer, data=RECORDS[: 20 + trainer.rank]) as part:
            part.train(1)

    with TrainingJob(2) as job:
        for error in job.outcomes(work):
            assert "different arguments for the evaluation val" in str(error)


def test_a_notice_on_one_rank_abandons_a_paused_evaluation_on_all():
    given = threading.Event()

    def work(trainer):
        def slow(model, batch):
            seen.append(int(batch[0]))
            if trainer.rank == 1 and not given.is_set():
                given.set()
                trainer.ckpt._preemption.on_notice(Notice("test"))
            threading.Event().wait(0.005)
            return {"n": (1, 1)}

        seen: list[int] = []
        options = {"evaluate": slow, "data": list(range(20_000)), "batch_size": 2}
        preemption = limpet.Preemption(notices=[], exit_fn=lambda: None)
        saves = {"save": EverySteps(10**9), "preemption": preemption}
        with evaluating(trainer, on="paused", **options, **saves) as part:
            part.train(30)
        return seen

    with TrainingJob(2, lockstep=False) as job:
        first, second = job.run(work)
        assert 1 <= len(first) == len(second) < 5000
        assert records(job, Evaluation) == []
        assert len(job.versions) == 1
