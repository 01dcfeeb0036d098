"""Evaluation inside a training with tables, by its workers: exact while the training goes on."""

import itertools
import threading
from contextlib import contextmanager

import pytest
import torch
from torchmetrics import SumMetric

import limpet
from limpet import tables
from limpet.errors import LimpetError, Preempted
from limpet.evaluation import TaskEvaluator
from limpet.format.names import parse_version
from limpet.notices.notice import Notice
from limpet.storage.memory import MemoryStore
from limpet.tables.messages import Entry, Mark, Push, Rates, Sender
from limpet.tables.server import TableServer
from limpet.threads import no_op
from tests.tables.test_training import (
    add_records,
    consumed,
    count_records,
    counting_table,
    run_model,
    same,
    seen,
    train_counting,
)  # fmt: skip
from tests.tables.trainings import keep_views_at_their_limit
from tests.training.test_training_evaluation import ends, exact, inexact
from tests.waiting import wait_until

RECORDS, EVALUATED = 200, 12


def make_dense():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), 1.0)


class Stop(Exception):
    """Ends a training as a crash would."""


class Training:
    """A training whose state shows its step: the sum of the rows is the number of the records that
    were consumed, and the dense weight is the number of steps. ``hook`` is called by each call of
    the evaluation; ``during`` has their cuts, and the steps of the training then."""

    def __init__(
        self, store, *, servers=2, workers=2, options=None, hook=no_op, queue=None, **more
    ):
        self.workers, self.hook, self.during = workers, hook, []
        self.queue = limpet.tasks.Queue() if queue is None else queue
        add_records(self.queue, RECORDS)
        self.servers = tables.Servers(
            [counting_table()], servers, dense=make_dense, **(options or {})
        )
        state = {"tables": self.servers, "queue": self.queue, "progress": limpet.Progress()}
        more = {"save": limpet.EverySteps(1000), "quiet": True, **more}
        self.ckpt = limpet.Checkpointer(store, state, **more)

    def train(self, worker):
        model = torch.nn.Linear(1, 1)
        worker.dense(model)
        evaluate = self.evaluate(worker, model)
        while (records := worker.next(5, evaluate=evaluate)) is not None:
            assert model.training
            assert not worker.tables.cut
            count_records(worker, records)
            (-model.weight.sum()).backward()
            worker.step()

    def evaluate(self, worker, model):
        module = tables.Embedding(worker.tables, "seen")

        def evaluate(records):
            assert not model.training
            assert not torch.is_grad_enabled()
            self.hook(worker)
            self.during.append((worker.tables.cut, self.ckpt.current_step))
            ids = [i for i in range(RECORDS) if i % EVALUATED in records]
            return self.metrics(module(torch.tensor(ids)).sum(), model.weight, len(records))

        return evaluate

    def metrics(self, found, weight, count):
        part = count / EVALUATED
        return {"seen": (found, part), "weight": (weight * part, part)}

    def __call__(self, *, on="cut", every=10, **options):
        options = {
            "data": EVALUATED, "batch_size": 1, "name": "val", "queue": self.queue, **options
        }  # fmt: skip
        every = limpet.EverySteps(every)
        self.evaluation = limpet.TrainingEvaluation(self.ckpt, every=every, on=on, **options)
        try:
            with self.ckpt, self.evaluation:
                self.ckpt.resume()
                self.servers.train(
                    self.train, workers=self.workers, queue=self.queue, ckpt=self.ckpt,
                    evaluation=self.evaluation,
                )  # fmt: skip
        finally:
            cuts = [[*s.shards["seen"].rows._cuts, *s._held] for s in self.servers.servers]
            assert not any(cuts), "a cut leaks"
            assert [job.name for job in self.queue.jobs()] == ["records"]
        return self


def recorded(store):
    """The exact metrics by step."""
    return {parse_version(version).step: metrics for version, metrics in exact(store)}


def saved(store, step):
    """What a separate program finds in a version: the sum of the rows."""
    view = tables.open(limpet.open(store.at(f"version_{step}")))
    return float(view["seen"].lookup(torch.arange(RECORDS)).sum())


@pytest.mark.parametrize("options", [{}, {"grads_to_wait": 2}], ids=str)
@pytest.mark.parametrize("on", ["cut", "paused"])
def test_exact_metrics_are_those_of_the_version_of_the_step(on, options):
    """B 45, B 48."""
    store = MemoryStore()
    with ends() as ended:
        training = Training(store, options=options)(on=on, every=7)
    found = recorded(store)
    assert len(found) >= 2
    assert max(found) == training.ckpt.current_step
    for step, metrics in found.items():
        assert metrics == pytest.approx({"seen": saved(store, step), "weight": step})
    assert [(e["state"], e["first_step"]) for e in ended] == [("DONE", step) for step in found]
    assert len(training.during) == EVALUATED * len(found)
    went_on = any(step not in found for _, step in training.during)
    assert went_on == (on == "cut") or options
    assert seen(training.servers, RECORDS) == [1] * RECORDS


def test_current_rows_give_an_inexact_score():
    store = MemoryStore()
    training = Training(store)(on="current", keep=True)
    assert not exact(store)
    found = inexact(store)
    assert found
    assert all(
        first <= metrics["weight"] <= last + training.workers for _, first, last, metrics in found
    )
    assert any(first < last for _, first, last, _ in found)


class WithMetrics(Training):
    def metrics(self, found, weight, count):
        metric = SumMetric()
        metric.update(found)
        return {"seen": metric, "weight": (weight * count, count)}


@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_metrics_do_not_depend_on_the_size_of_batches(batch_size):
    """B 46, B 51: also those of torchmetrics, whose states a worker merges."""
    store = MemoryStore()
    WithMetrics(store)(batch_size=batch_size, every=25)
    assert recorded(store)
    for step, metrics in recorded(store).items():
        assert metrics == pytest.approx({"seen": saved(store, step), "weight": step})


def test_what_is_due_while_an_evaluation_runs_becomes_one_that_follows():
    """B 50."""
    store = MemoryStore()
    training = Training(store)(every=2)
    found = sorted(recorded(store))
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert found[0] == 2
    assert len(found) < training.ckpt.current_step / 2
    assert min(gaps[:-1]) > 2, "at most one per worker and mini-batch"


def test_a_lost_worker_gives_its_task_to_another_one():
    store, is_lost, go_on, names = MemoryStore(), threading.Event(), threading.Event(), set()

    def hook(worker):
        names.add(worker.name)
        if worker.name == "worker 1" and not is_lost.is_set():
            is_lost.set()
            training.servers.resize_workers(1)
            go_on.wait(10)
        if worker.name != "worker 1" and is_lost.is_set():
            go_on.set()

    training = Training(store, hook=hook)()
    assert names >= {"worker 1", "worker 2"}
    for step, metrics in recorded(store).items():
        assert metrics == pytest.approx({"seen": saved(store, step), "weight": step})
    assert max(recorded(store)) == training.ckpt.current_step


def test_an_error_of_evaluate_records_nothing_and_ends_the_training():
    store = MemoryStore()

    def fail(worker):
        raise ValueError("no label")

    with ends() as ended, pytest.raises(LimpetError, match=r"step 10 failed.*(?s:.)*no label"):
        Training(store, hook=fail)()
    assert [(e["state"], e["first_step"]) for e in ended] == [("FAILED", 10)]
    assert "records" in ended[0]["cause"]
    assert "test_evaluation.py" in ended[0]["cause"]
    assert not exact(store)


def test_an_error_that_goes_away_is_tried_again():
    left = [2]

    def fail(worker):
        if left[0]:
            left[0] -= 1
            raise ValueError

    store = MemoryStore()
    Training(store, hook=fail)()
    assert 10 in recorded(store)


@pytest.mark.parametrize("options", [{}, {"grads_to_wait": 2}], ids=str)
def test_one_worker_evaluates_while_old_rows_are_at_their_limit(monkeypatch, options):
    """A push waits for the evaluation, which only its worker can do; a save does not wait."""
    keep_views_at_their_limit(monkeypatch)
    store, waits = MemoryStore(), []

    def hook(worker):
        shards = [server.shards["seen"] for server in training.servers.servers]
        waits.append(any(shard.rows.must_wait for shard in shards))

    training = Training(
        store, workers=1, hook=hook, options=options, save=limpet.EverySteps(3)
    )  # fmt: skip
    training.servers.fill("seen", range(RECORDS), torch.zeros(RECORDS, 1))
    training(every=12)
    assert any(waits)
    for step, metrics in recorded(store).items():
        assert metrics == pytest.approx({"seen": saved(store, step), "weight": step})
    assert seen(training.servers, RECORDS) == [1] * RECORDS


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"grads_to_wait": 1}], ids=str)
def test_a_worker_that_waits_for_an_evaluation_does_not_hang(monkeypatch, options):
    keep_views_at_their_limit(monkeypatch)
    names, queue = set(), limpet.tasks.Queue(lease_seconds=0.5)

    def hook(worker):
        names.add(worker.name)
        threading.Event().wait(0.1)

    training = Training(MemoryStore(), workers=1, hook=hook, options=options, queue=queue)
    training.servers.fill("seen", range(RECORDS), torch.zeros(RECORDS, 1))
    training(every=30)
    assert names == {"worker 1"}


def test_a_resume_does_not_repeat_a_recorded_evaluation():
    """That of step 20 is recorded with a version that is not the newest one."""

    class Stopping(Training):
        def train(self, worker):
            step = worker.step

            def step_or_stop():
                if ended:
                    raise Stop
                return step()

            worker.step = step_or_stop
            super().train(worker)

    store = MemoryStore()
    with ends() as ended, pytest.raises(Stop):
        Stopping(store, save=limpet.EverySteps(3))(every=20)
    assert [*recorded(store)] == [20]
    assert 20 < limpet.Run(store).latest().step < 40
    with ends() as ended:
        training = Training(store)(every=20)
    assert [e["state"] for e in ended] == ["DONE"] * len(ended)
    assert all(e["first_step"] >= 40 for e in ended)
    assert max(recorded(store)) == training.ckpt.current_step


def test_the_random_numbers_of_a_worker_do_not_change():
    found = []

    class Drawing(Training):
        def train(self, worker):
            torch.manual_seed(3)
            step = worker.step
            worker.step = lambda: found.append(torch.rand(1).item()) or step()
            super().train(worker)

    Drawing(MemoryStore(), workers=1, hook=lambda worker: torch.rand(5))()
    torch.manual_seed(3)
    torch.nn.Linear(1, 1)
    assert found == [torch.rand(1).item() for _ in found]


@pytest.mark.parametrize("on", ["cut", "paused", "current"])
def test_a_notice_ends_an_evaluation_and_the_resume_begins_it_again(on):
    """The version that is saved then has tasks of that evaluation, which nobody does."""
    store = MemoryStore()

    def hook(worker):
        if len(training.during) == 5:
            training.ckpt._preemption.on_notice(Notice("test"))
            wait_until(lambda: ended)

    training = Training(
        store, hook=hook, preemption=limpet.Preemption(notices=[]), keep=limpet.KeepLast(1)
    )
    with ends() as ended, pytest.raises(Preempted):
        training(on=on)
    assert [(e["state"], e["first_step"]) for e in ended] == [("ABANDONED", 10)]
    assert exact(store) == inexact(store) == []
    newest = limpet.Run(store).latest().step
    with ends() as ended:
        training = Training(store)(on=on)
    assert ended[0]["first_step"] == newest
    assert {e["state"] for e in ended} == {"INEXACT" if on == "current" else "DONE"}
    assert len(training.during) == EVALUATED * len(ended)


@pytest.mark.parametrize("on", ["cut", "paused"])
def test_the_metric_stops_the_training_and_the_last_step_is_evaluated(on):
    store, stop = MemoryStore(), limpet.StopWhen("weight", mode="min", patience=1)
    training = Training(store, stop=stop, keep=limpet.KeepBest(1, "weight", mode="min"))(
        on=on, every=3
    )
    steps = training.ckpt.current_step
    assert steps < RECORDS // 5
    assert sum(seen(training.servers, RECORDS)) <= 5 * steps
    assert max(recorded(store)) == steps
    assert limpet.Run(store).best("weight").step == 3
    again = Training(store, stop=stop)(on=on, every=3)
    assert again.ckpt.current_step == steps
    assert not again.during


def test_retention_keeps_the_version_that_is_evaluated():
    store = MemoryStore()
    training = Training(store, save=limpet.EverySteps(1), keep=limpet.KeepLast(1))
    with ends() as ended:
        training(every=5)
    assert {e["state"] for e in ended} == {"DONE"}
    assert len(ended) > 1
    assert len(limpet.Run(store).snapshots()) <= 2


def test_a_failed_save_leaves_nothing_behind():
    training = Training(MemoryStore())
    training.ckpt._start_save = None  # as if anything went wrong between the pin and the cut
    with pytest.raises(TypeError):
        training()
    names = [entry.name for entry in training.ckpt.run.store.list("")]
    assert not [name for name in names if "pin" in name]


@pytest.mark.slow
def test_an_evaluation_changes_no_bit_of_a_synchronous_training(tmp_path, monkeypatch):
    expected = run_model(tmp_path / "a", 2, 2, grads_to_wait=4)
    real = tables.Servers.train

    def train_and_evaluate(servers, train, *, workers, queue, ckpt):
        evaluation = limpet.TrainingEvaluation(
            ckpt, data=30, batch_size=3, every=limpet.EverySteps(3), queue=queue, on="cut"
        )

        def train_evaluating(worker):
            take = worker.next
            worker.next = lambda size: take(size, evaluate=lambda r: {"r": (torch.rand(1), 1)})
            train(worker)

        with evaluation:
            real(servers, train_evaluating, workers=workers, queue=queue, ckpt=ckpt,
                 evaluation=evaluation)  # fmt: skip
        assert evaluation.newest is not None

    monkeypatch.setattr(tables.Servers, "train", train_and_evaluate)
    assert same(run_model(tmp_path / "b", 2, 3, grads_to_wait=4), expected)


def test_one_process_without_workers_evaluates_its_rows():
    store, servers = MemoryStore(), tables.Servers([counting_table()])
    module, state = tables.Embedding(servers, "seen"), {"tables": servers}

    def evaluate(model, ids):
        return {"seen": (model(ids).sum(), len(ids) / RECORDS)}

    with (
        limpet.Checkpointer(store, state, save=limpet.Never(), quiet=True) as ckpt,
        limpet.TrainingEvaluation(
            ckpt, module, evaluate, data=range(RECORDS), every=limpet.EverySteps(4)
        ) as evaluation,
    ):
        for step in ckpt.steps(9):
            evaluation.step()
            module(torch.tensor([step])).sum().neg().backward()
            servers.step()
            ckpt.step()
    assert recorded(store) == {step: {"seen": pytest.approx(step)} for step in (4, 8, 9)}


# -- a queue without tables ------------------------------------------------------------------------


def test_workers_of_a_queue_without_tables_evaluate_too():
    """Also after the last training task."""
    store, queue, model = MemoryStore(), limpet.tasks.Queue(), torch.nn.Linear(1, 1)
    state = {"model": model, "queue": queue, "progress": limpet.Progress()}
    evaluator = TaskEvaluator(lambda records: {"records": (len(records), 1 / len(records))})
    with (
        limpet.Checkpointer(store, state, quiet=True) as ckpt,
        limpet.TrainingEvaluation(
            ckpt, data=[*range(20)], batch_size=5, every=limpet.EverySteps(3), queue=queue,
            on="current", counts=True, keep=True,
        ) as evaluation,
    ):  # fmt: skip
        for _ in ckpt.steps(7):
            evaluation.step()
            queue.evaluation.evaluate_one(evaluator)
            ckpt.step()
        while not evaluation.finish():
            queue.evaluation.evaluate_one(evaluator)
    found = inexact(store)
    assert [(first, last) for _, first, last, _ in found] == [(3, 7), (7, 7)]
    assert all(metrics == {"records": pytest.approx(20 / 0.8)} for *_, metrics in found)


@contextmanager
def evaluating(on):
    """An evaluation of 5 records after each step, without tables."""
    queue = limpet.tasks.Queue()
    with (
        limpet.Checkpointer(MemoryStore(), {"queue": queue}, quiet=True) as ckpt,
        limpet.TrainingEvaluation(
            ckpt, data=5, every=limpet.EverySteps(1), queue=queue, on=on
        ) as evaluation,
    ):
        yield ckpt, queue, evaluation


def test_a_result_after_the_end_of_its_evaluation_does_not_count():
    """B 47."""
    with evaluating("current") as (ckpt, queue, evaluation):
        ckpt.step()
        evaluation.step()
        task = queue.evaluation.get()
        evaluation.abandon("for a test")
        assert not task.done(TaskEvaluator(lambda records: {"n": (1, 1)})(task))
        evaluation.step()
        assert queue.evaluation.get().attempt > task.attempt, "it begins again"
    assert not inexact(ckpt.run.store)


@pytest.mark.parametrize("result", [5, {"loss": 1.0}, {"state": 5}, {"state": {}}], ids=str)
def test_results_of_something_else_are_an_error(result):
    with evaluating("current") as (ckpt, queue, evaluation):
        ckpt.step()
        evaluation.step()
        assert queue.evaluation.evaluate_one(lambda task: result)
        with pytest.raises(LimpetError, match="step 1 failed"):
            evaluation.finish()
        assert evaluation.finish()
        assert not queue.jobs()


@pytest.mark.parametrize("on", ["cut", "paused"])
def test_without_tables_an_exact_evaluation_is_refused(on):
    with evaluating(on) as (ckpt, queue, evaluation):
        ckpt.step()
        with pytest.raises(LimpetError, match="needs Servers"):
            evaluation.step()
        assert not queue.jobs()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "the workers have them"),
        ({"evaluate": len}, "the workers have them"),
        ({"collate": list}, "the workers have them"),
        ({"batch_size": None}, "batch_size"),
        ({"data": 0}, "map-style"),
        ({"queue": 5}, "a Queue"),
        ({"queue": None, "evaluate": len, "data": [1]}, "without queue="),
    ],
    ids=str,
)
def test_mistakes_of_an_evaluation(options, match):
    training = Training(MemoryStore())
    with pytest.raises(LimpetError, match=match):
        training(**options)


def test_an_evaluation_needs_the_queue_of_the_training_and_workers_that_evaluate():
    training = Training(MemoryStore())
    with pytest.raises(LimpetError, match="with this queue"):
        training.servers.train(
            training.train, workers=1, queue=training.queue, ckpt=training.ckpt, evaluation=7
        )
    training.train = train_dense
    with pytest.raises(LimpetError, match="needs evaluate="):
        training()


def train_dense(worker):
    worker.dense(torch.nn.Linear(1, 1))
    train_counting(worker)


def test_workers_that_return_too_early_are_an_error():
    def train(worker):
        worker.dense(torch.nn.Linear(1, 1))
        while len(records := worker.next(5, evaluate=len)) and training.ckpt.current_step < 12:
            count_records(worker, records)
            worker.step()

    training = Training(MemoryStore(), workers=1)
    training.train = train
    with pytest.raises(LimpetError, match="until it returns None"):
        training(every=10)


# -- the servers -----------------------------------------------------------------------------------


def test_a_late_or_repeated_message_about_a_cut_has_no_effect():
    server = TableServer([counting_table()], range(4096))
    server.restart(1, 0)
    rates = Rates({"seen": 1.0})

    def push(number, committed):
        ids, gradient = torch.tensor([3]).numpy(), torch.tensor([[-1.0]])
        entry = Entry(committed, server.epoch, committed, rates) if committed else None
        sender = Sender(1, "w", committed, entry)
        return server.push(sender, number, Push({"seen": (ids, gradient)}, {}, {}))

    def look_up(cut=""):
        return server.pull(None, "seen", torch.tensor([3]).numpy(), cut).item()

    assert push(1, 0)
    first = Mark(1, 1, {"w": Entry(1, 0, 1, rates)}, rates)
    server.hold(first)
    assert push(2, 1)
    assert push(3, 2)
    server.hold(first)  # twice
    assert (look_up(), look_up("1")) == (2.0, 1.0)
    server.hold(Mark(1, 2, {"w": Entry(3, 1, 3, rates)}, rates))
    assert (look_up(), look_up("1"), look_up("2")) == (3.0, 1.0, 3.0)
    for _ in range(2):
        server.release("1")
    server.hold(first)  # late
    with pytest.raises(LimpetError, match="released"):
        look_up("1")
    assert look_up("2") == 3.0
    server.restart(2, 2)
    assert not server.shards["seen"].rows._cuts


# -- a job of its own ------------------------------------------------------------------------------


def set_up(snapshot):
    return tables.open(snapshot)


def evaluate_view(view, records):
    return {"seen": (view["seen"].lookup(records).sum(), 1 / RECORDS * len(records))}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_separate_job_evaluates_versions_with_their_rows(tmp_path, workers):
    """B 49."""
    training = Training(tmp_path, save=limpet.EverySteps(15))
    with training.ckpt:
        training.ckpt.resume()
        training.servers.train(training.train, workers=2, queue=training.queue, ckpt=training.ckpt)
    outcomes = limpet.Evaluation(
        tmp_path, set_up, evaluate_view, data=data, workers=workers,
        select=limpet.evaluation.Selection(skip_none=True),
    ).run()  # fmt: skip
    assert len(outcomes) == 3
    for outcome in outcomes:
        counts = consumed(
            limpet.load(f"{tmp_path}/{outcome.version}", keys="queue/**")["queue"], RECORDS
        )
        assert outcome.metrics["seen"] == pytest.approx(sum(counts))


def data():
    return range(RECORDS)
