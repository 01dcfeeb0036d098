"""Trainings of several ranks: all ranks save at the same steps, whatever makes a save due."""

import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import limpet
from limpet.errors import LimpetError, PlanError, StoreError
from limpet.format import names
from limpet.format.records import Pin, encode_record
from limpet.loading.snapshot import reader_of
from limpet.notices.notice import Notice
from limpet.run.policy import (
    Continuously,
    EverySeconds,
    EverySteps,
    KeepBest,
    KeepLast,
    SavePolicy,
    StopWhen,
)
from limpet.run.run import Run
from limpet.run.save_request import put_request, read_request
from tests.ranks.trainings import TrainingJob, matches_uninterrupted

WRITES = {"put", "write_at", "commit", "put_if_absent"}


@contextmanager
def clocks(time_of_rank):
    """Give the cadence of each rank its own clock."""

    def monotonic():
        return time_of_rank(int(threading.current_thread().name.partition("-")[2]))

    with mock.patch("limpet.training.cadence.time", SimpleNamespace(monotonic=monotonic)):
        yield


@contextmanager
def recorded_events():
    """Record the events of all ranks."""
    events: list[tuple[str, dict[str, Any]]] = []
    with limpet.attach(lambda name, fields: events.append((name, fields))):
        yield events


def pause():
    """Make a step long enough for the watchers to poll."""
    time.sleep(0.01)


@pytest.mark.parametrize("size", [2, 3])
def test_saves_at_fixed_steps_need_no_agreement(size):
    with TrainingJob(size, lockstep=False) as job:
        agreement_keys = []
        for view in job.group.views:
            view.before = lambda method, key: (
                agreement_keys.append(key) if "training" in key and method != "check" else None
            )
        job.train(23, save=EverySteps(5))
        assert job.versions == [5, 10, 15, 20]
        assert all(trainer.saved_steps == [5, 10, 15, 20] for trainer in job.ranks)
        # only at the end, each rank writes that it has left the training
        assert not [key for key in agreement_keys if not key.endswith(("/1", "/left"))]
        assert job.leftover_keys() == []
        report = Run(job.inner).open(names.Version(20, 0)).verify()
        assert report.ok, report.problems


@pytest.mark.parametrize("size", [2, 3])
def test_a_resumed_training_equals_an_uninterrupted_one(size):
    with TrainingJob(size) as job:
        job.train(23, save=EverySteps(5))
        job.train(31, save=EverySteps(5))
        assert [trainer.resumed.step for trainer in job.ranks] == [20] * size
        assert all(
            matches_uninterrupted(trainer.state, trainer.rank, size, 31) for trainer in job.ranks
        )
        assert job.versions == [5, 10, 15, 20, 25, 30]
        reasons = [s.metadata["reason"] for s in Run(job.inner).snapshots()]
        assert reasons == ["cadence"] * 6


@pytest.mark.slow
@pytest.mark.parametrize("policy", [EverySeconds(60), Continuously(60)])
def test_only_the_clock_of_rank_0_makes_a_save_due(policy):
    """The clocks of the other ranks run fast, run backward, or stop."""
    now = [0.0]

    def time_of_rank(rank):
        return (now[0], 1e9 * now[0], -now[0], 7.0)[rank]

    with TrainingJob(4) as job, clocks(time_of_rank):

        def before_step():
            pause()
            now[0] += 1

        job.before_step = before_step
        job.train(310, save=policy, at_end=False)
        steps = job.versions
        assert 2 <= len(steps) <= 5, steps
        assert all(trainer.saved_steps == steps for trainer in job.ranks)
        assert steps[0] >= 60
        assert all(b - a >= 60 for a, b in pairwise(steps))
        assert job.leftover_keys() == []


@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_continuously_saves_on_all_ranks_at_one_step_and_no_rank_waits(size, slow):
    """The shard of one rank cannot be written for 40 steps."""
    with TrainingJob(size) as job:
        until, begun = threading.Event(), list[int]()
        delay_shards(job, slow % size, until)

        def before_step():
            now = job.ranks[0].ckpt._saver.begun_step
            if len(begun) == 40:
                until.set()
            elif now:
                begun.append(now)
            if now == 0 or (until.is_set() and now == begun[-1]):
                pause()

        job.before_step = before_step
        job.train(300, save=Continuously(0), at_end=False)
        steps = job.versions
        assert {*begun} == {steps[0]}, "one save, for which no step has waited"
        assert len(steps) >= 2
        assert steps[1] > steps[0] + 39
        assert all(trainer.saved_steps == steps for trainer in job.ranks)
        assert all(
            matches_uninterrupted(trainer.state, trainer.rank, size, 300) for trainer in job.ranks
        )
        assert job.leftover_keys() == []


class CustomPolicy(SavePolicy):
    """A policy that depends on the step and on the clock."""

    def due(self, now):
        return now.step % 7 == 3 or now.seconds - now.last_seconds > 5


def test_custom_and_combined_policies():
    with TrainingJob(2) as job, clocks(lambda rank: 0.0):
        job.train(20, save=CustomPolicy() | EverySteps(10) | EverySeconds(600))
        assert job.versions == [3, 10, 17, 20]


def delay_shards(job, rank, until):
    """Make the store of a rank wait for ``until`` before it commits a shard."""

    def wait(method, key):
        if method == "commit" and key.endswith(".safetensors"):
            until.wait(20)

    job.set_before_call(rank, wait)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.slow
def test_all_ranks_wait_for_a_save_in_flight(rank):
    with TrainingJob(3) as job, recorded_events() as events:
        until = threading.Event()
        delay_shards(job, rank, until)

        def release():  # after all ranks have reached the next save
            while not all(
                hasattr(trainer, "ckpt") and trainer.ckpt.current_step >= 10
                for trainer in job.ranks
            ):
                time.sleep(0.01)
            time.sleep(1)
            until.set()

        job.before_step = lambda: releasing.start() if not releasing.ident else None
        releasing = threading.Thread(target=release)
        job.train(16, save=EverySteps(5))
        assert job.versions == [5, 10, 15]
        waited = [f["step"] for name, f in events if name == "save_waited"]
        assert set(waited) <= {10, 15}
        assert len([s for s in waited if s == 10]) == 3


def test_a_request_during_the_wait_before_a_save_is_answered_by_that_save():
    with TrainingJob(2) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                saver = trainer.ckpt._saver
                original = saver.wait_for_turn

                def request_and_wait():
                    if trainer.rank == 0 and trainer.ckpt.current_step == 10:
                        put_request(job.inner, "0123456789ab")
                        trainer.ckpt._watcher.poll()
                    return original()

                with mock.patch.object(saver, "wait_for_turn", request_and_wait):
                    trainer.train_steps(16)

        job.run(work)
        reasons = {s.step: s.metadata["reason"] for s in Run(job.inner).snapshots()}
        assert reasons == {5: "cadence", 10: "request", 15: "cadence"}
        assert read_request(job.inner) is None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1, 2]])
def test_a_signal_on_any_rank_causes_one_save(ranks):
    """Launchers send the signal to one rank or to all ranks."""
    with TrainingJob(3) as job:

        def before_step():
            pause()
            if job.ranks[0].ckpt.current_step == 10:
                for rank in ranks:
                    job.ranks[rank].ckpt._preemption.on_notice(Notice("a test", stops=False))

        job.before_step = before_step
        job.train(100, save=EverySteps(1000))
        assert len(job.versions) == 1
        assert Run(job.inner).snapshots()[0].metadata["reason"] == "request"


@pytest.mark.slow
def test_rank_0_decides_when_to_stop():
    """The other ranks pass other metrics, or none."""
    with TrainingJob(3) as job:
        job.before_step = pause

        def work(trainer):
            def metrics(step):
                return ({"loss": -float(min(step, 30))}, {"loss": 1.0}, None)[trainer.rank]

            stop = StopWhen("loss", patience=10)
            trainer.train(500, metrics, save=EverySteps(4), stop=stop)
            return trainer.ckpt.current_step, trainer.ckpt.should_stop

        results = job.run(work)
        assert len(set(results)) == 1, results
        stop_step, stopped = results[0]
        assert stopped
        assert 40 <= stop_step < 300
        newest = job.versions[-1]

        # a resumed training continues to count, and all ranks stop at once
        assert len(set(job.run(work))) == 1
        assert [trainer.resumed.step for trainer in job.ranks] == [newest] * 3
        assert all(trainer.ckpt.should_stop for trainer in job.ranks)


@pytest.mark.parametrize("size", [2, 3])
def test_scores_of_a_separate_job_stop_all_ranks_at_one_step(size):
    """Only rank 0 reads the records. A restarted job stops at once, on all ranks."""
    with TrainingJob(size) as job:
        job.before_step = pause
        evaluator, stop = Run(job.inner), StopWhen("val_loss", patience=3)
        options = {"save": EverySteps(4), "keep": KeepLast(2), "stop": stop}

        def evaluate(method, key):
            if method == "put_if_absent" and key.endswith("/manifest.json"):
                step = int(key.partition("/")[0].removeprefix("version_"))
                evaluator.add_metrics(step, {"val_loss": float(step)})

        job.ranks[0].store.after = evaluate
        job.train(300, **options)
        [end] = {trainer.ckpt.current_step for trainer in job.ranks}
        assert 16 < end < 200
        assert all(trainer.ckpt.should_stop for trainer in job.ranks)
        assert Run(job.inner).ended() == f"stopped by {stop}"
        for trainer in job.ranks[1:]:
            assert not [key for _, key in trainer.calls if "eval-" in key]

        job.train(300, **options)
        assert {trainer.ckpt.current_step for trainer in job.ranks} == {job.versions[-1]}
        assert all(trainer.ckpt.should_stop for trainer in job.ranks)


def test_save_metrics_and_wait_on_all_ranks():
    with TrainingJob(3) as job:

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                assert trainer.ckpt.resume() is None
                assert trainer.ckpt.wait() is None
                trainer.train_steps(7)
                waited = trainer.ckpt.wait()
                saved = trainer.ckpt.save({"acc": 10.0 + trainer.rank})
                updated = trainer.ckpt.save(
                    {"acc": 20.0 + trainer.rank} if trainer.rank else {"acc": 30.0}
                )
                repeated = trainer.ckpt.save()
                trainer.train_steps(12)
            return (
                waited.step,
                saved.step,
                reader_of(updated).digest,
                reader_of(repeated).digest,
                trainer.ckpt.statistics(),
            )

        results = job.run(work)
        assert {o[:2] for o in results} == {(5, 7)}
        assert len({d for o in results for d in o[2:4]}) == 1
        assert job.versions == [5, 7, 10]
        run = Run(job.inner)
        assert run.open(names.Version(7, 0)).metadata["metrics"] == {"acc": 10.0}
        assert run.metrics(7) == {"acc": 30.0}
        for *_, statistics in results:
            assert statistics["saves"] == 3
            assert statistics["failures"] == 0
            assert 0 <= statistics["goodput"] <= 1


def test_metrics_that_cannot_be_written_raise_on_all_ranks():
    with TrainingJob(3) as job:

        def refuse(method, key):
            if "/eval-metrics" in key:
                raise StoreError("The disk is full")

        job.set_before_call(0, refuse)

        def work(trainer):
            with trainer.make_checkpointer(save=EverySteps(5)):
                trainer.train_steps(5)
                with pytest.raises(LimpetError, match="The disk is full"):
                    trainer.ckpt.save({"acc": 1.0})
                trainer.train_steps(11)
            return "finished"

        assert job.run(work) == ["finished"] * 3
        assert job.versions == [5, 10]


def test_a_second_job_is_refused_on_all_ranks():
    with TrainingJob(3) as job:
        other = Pin("fedcba987654", None, "2026-11-21T00:00:00Z", "elsewhere x", "y", "12:34")
        job.inner.put_if_absent(names.WRITER_LOCK, encode_record(other))
        with mock.patch("limpet.snapshot.pins.is_holder_alive", return_value=True):
            outcomes = job.outcomes(lambda trainer: trainer.train(7, save=EverySteps(5)))
        assert all(isinstance(o, LimpetError) for o in outcomes), outcomes
        assert all("Another training writes to this run" in str(o) for o in outcomes), outcomes
        assert job.versions == []


def test_a_training_that_lost_the_writer_lock_raises_on_all_ranks():
    """It raises also with ``on_error="warn"``, because no store has failed."""
    with TrainingJob(3) as job:

        def before_step():
            if job.ranks[0].ckpt.current_step == 7:
                job.wait_for_saves()
                job.inner.delete(names.WRITER_LOCK)
                other = Pin("fedcba987654", None, "2026-11-21T00:00:00Z", "else x", "y", "12:34")
                job.inner.put_if_absent(names.WRITER_LOCK, encode_record(other))

        job.before_step = before_step
        outcomes = job.outcomes(
            lambda trainer: trainer.train(30, save=EverySteps(5), on_error="warn")
        )
        assert all(isinstance(o, LimpetError) for o in outcomes), outcomes
        assert all("Another training has taken this run over" in str(o) for o in outcomes), outcomes
        assert [trainer.ckpt.current_step for trainer in job.ranks] == [15] * 3
        assert job.versions == [5]


def test_only_rank_0_manages_the_run():
    """The other ranks access only their own shard and its index."""
    with TrainingJob(3) as job:
        keep = KeepLast(2) | KeepBest(1, "loss")
        losses = {5: 9.0, 10: 1.0}
        job.train(42, lambda s: {"loss": losses.get(s, 5.0)}, save=EverySteps(5), keep=keep)
        assert job.versions == [10, 35, 40]
        for trainer in job.ranks[1:]:
            calls = trainer.calls_without_pin_checks()
            assert {method for method, _ in calls} == WRITES
            assert all(f"/shard-{trainer.rank:05d}" in key for _, key in calls), calls
            # one save: the put of the shard, its two pieces, its commit, and the index
            assert len(calls) == 5 * 8, calls


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("add", ["metrics", "end_epoch", "save"])
def test_retention_decides_with_metrics_that_come_after_the_last_save(size, add):
    """Those of rank 0 count, and only rank 0 reads and deletes."""

    def work(trainer):
        keep = KeepBest(1, "val", mode="min")
        with trainer.make_checkpointer(save=EverySteps(1), keep=keep):
            trainer.train_steps(3, lambda step: {"val": (0.5, 0.6, 0.7)[step - 1]})
            trainer.ckpt.wait()
            getattr(trainer.ckpt, add)({"val": 9.0 if trainer.rank else 0.1})

    with TrainingJob(size) as job:
        job.run(work)
        assert job.versions == [3]
        for trainer in job.ranks[1:]:
            assert {method for method, _ in trainer.calls_without_pin_checks()} == WRITES
        assert job.leftover_keys() == []


@pytest.mark.parametrize(
    ("options_of_rank", "message"),
    [
        (
            lambda r: {"save": EverySteps(5 + 2 * r) | EverySeconds(60)},
            r"save=EverySteps\(steps=5\) \| EverySeconds\(seconds=60\).*=7.*rank 1",
        ),
        (lambda r: {"on_error": "warn" if r == 2 else "raise"}, "='raise'.*'warn' on rank 2"),
        (lambda r: {"incremental": 30 if r else 20}, "incremental=20.*30 on rank 1"),
        (lambda r: {"overlap": r == 1}, "overlap=False.*True on rank 1"),
        (lambda r: {"at_end": r == 2}, "at_end=False.*True on rank 2"),
    ],
)
def test_different_arguments_raise_at_the_first_step(options_of_rank, message):
    with TrainingJob(3) as job:
        began = time.monotonic()
        outcomes = job.outcomes(lambda trainer: trainer.train(20, **options_of_rank(trainer.rank)))
        assert time.monotonic() - began < 3
        assert {type(o) for o in outcomes} == {PlanError}, outcomes
        assert len({str(o) for o in outcomes}) == 1
        with pytest.raises(PlanError, match=message):
            raise outcomes[0]
        assert job.versions == []


def test_policies_that_print_an_address_are_equal():
    with TrainingJob(2) as job:
        job.train(4, save=CustomPolicy())
        assert job.versions == [3]


def test_ranks_at_different_steps_raise():
    with TrainingJob(2, lockstep=False) as job:

        def work(trainer):
            trainer.make_checkpointer(save=EverySteps(5))
            trainer.state["progress"].step = 7 * trainer.rank
            with trainer.ckpt:
                trainer.train_steps(20)

        outcomes = job.outcomes(work)
        assert {type(o) for o in outcomes} == {PlanError}
        assert "current_step=1 on all ranks" in str(outcomes[1])
        assert "current_step=8 on rank 1" in str(outcomes[1])
