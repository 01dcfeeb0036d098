"""Random sequences of what workers and owners do, against a simple model.

Whatever happens: every record is counted once per epoch, no task is lost, no result is merged
twice, and a job that fails blocks no other.
"""

import copy
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from limpet.errors import JobFailed, LeaseLost, PlanError, TaskError
from limpet.tasks import EvaluationTask, Job, PredictionTask, Queue, Task, TrainingTask
from tests.tasks.clock import FakeClock

ATTEMPTS = 3
WORKERS = st.sampled_from(["a", "b", "c"])
DATA: dict[str, int | range] = {"f": 7, "g": range(3, 8)}
EPOCHS = 2
ALL_RECORDS = Counter({(n, i, e): 1 for n, d in (("f", range(7)), ("g", range(3, 8)))
                       for i in d for e in range(EPOCHS)})  # fmt: skip


class QueueMachine(RuleBasedStateMachine):
    """``counted`` has the records that the queue has accepted as consumed."""

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.queue = Queue(lease_seconds=10, attempts=ATTEMPTS, clock=self.clock)
        self.counted: Counter[tuple[str, int, int]] = Counter()
        self.handed_out: list[Task] = []  # all tasks ever, with their reports
        self.saved: tuple[Any, Counter[tuple[str, int, int]], Any] | None
        self.saved = None
        self.jobs: dict[str, Job] = {}
        self.results: dict[
            str, dict[int, int | None]
        ] = {}  # the first accepted result of each task
        self.number = 0

    @initialize()
    def add_training(self):
        self.queue.add("training", DATA, task_size=3, epochs=EPOCHS, name="train")

    @rule(kind=st.sampled_from(["evaluation", "prediction"]))
    def add_job_with_results(self, kind):
        name = f"{kind[0]}{self.number}"
        self.number += 1
        self.jobs[name] = self.queue.add(kind, 5, task_size=2, name=name)
        self.results[name] = {}

    @rule(
        kind=st.sampled_from(["training", "training", "evaluation", "prediction"]), worker=WORKERS
    )
    def get(self, kind, worker):
        task = self.queue.get(kind, worker)
        if task is not None:
            assert task.attempt > max((t.attempt for t in self.handed_out), default=0)
            self.handed_out.append(task)

    def pick(self, data, kind):
        """Any task that was ever handed out, most likely a recent one."""
        tasks = [t for t in self.handed_out if isinstance(t, kind)]
        return data.draw(st.sampled_from(tasks[-6:])) if tasks else None

    @rule(data=st.data(), records=st.integers(1, 3))
    def consume(self, data, records):
        task = self.pick(data, TrainingTask)
        if task is None or not task.records_left:
            return
        start = task.position
        try:
            task.consumed(min(records, task.records_left))
        except LeaseLost:
            assert task.position == start
            return
        self.count(task, start, task.position)

    @rule(data=st.data())
    def duplicate_report(self, data):
        task = self.pick(data, TrainingTask)
        if task is not None:
            with suppress(LeaseLost):
                self.queue.report_consumed([task.report])

    @rule(data=st.data())
    def done_training(self, data):
        task = self.pick(data, TrainingTask)
        if task is not None and task.done():
            self.count(task, task.position, task.stop)
            assert not task.done()

    def count(self, task, start, stop):
        self.counted.update((task.data, i, task.epoch) for i in range(start, stop))

    @rule(data=st.data(), result=st.integers())
    def done_with_result(self, data, result):
        task = self.pick(data, EvaluationTask | PredictionTask)
        if isinstance(task, PredictionTask) and result % 2:
            if task.done():
                self.results[task.job][task.id] = None
        elif task is not None and task.done(result):
            assert task.id not in self.results[task.job]
            self.results[task.job][task.id] = result

    @rule(data=st.data(), kind=st.sampled_from([TrainingTask, EvaluationTask, PredictionTask]))
    def release(self, data, kind):
        task = self.pick(data, kind)
        if task is not None:
            task.release()

    @rule(data=st.data())
    def fail(self, data):
        task = self.pick(data, Task)
        if task is not None:
            task.fail("failed")

    @rule(worker=WORKERS)
    def lose_worker(self, worker):
        self.queue.recover(worker)

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def save(self):
        state = copy.deepcopy(self.queue.state_dict())
        self.saved = (state, self.counted.copy(), copy.deepcopy(self.results))

    @precondition(lambda self: self.saved is not None)
    @rule(restart=st.booleans())
    def load(self, restart):
        assert self.saved is not None
        state, counted, results = self.saved
        if restart:
            self.queue = Queue(lease_seconds=10, attempts=ATTEMPTS, clock=self.clock)
            self.handed_out = []
        try:
            self.queue.load_state_dict(copy.deepcopy(state))
        except PlanError:  # a new one would be lost
            assert any(job.kind == "prediction" for job in self.jobs.values())
            return
        assert self.queue.state_dict() == state
        self.counted, self.results = counted.copy(), copy.deepcopy(results)
        names = [name for name in results if f'"{name}"' in str(state)]
        self.jobs = {name: self.queue.job(name) for name in names}

    @rule()
    def collect(self):
        for name, job in list(self.jobs.items()):
            try:
                results = job.results()
            except JobFailed:
                pass
            except TaskError:
                continue
            else:
                assert results == [v for _, v in sorted(self.results[name].items())]
                assert len(results) == job.tasks == 3
            del self.jobs[name]

    @invariant()
    def no_record_is_counted_twice(self):
        assert all(n == 1 for n in self.counted.values())
        assert self.counted <= ALL_RECORDS

    def teardown(self):
        """After a load, which lets failed jobs be tried again, one worker can complete all that is
        not done yet, and then nothing is left."""
        self.collect()
        self.queue.load_state_dict(self.queue.state_dict())
        while not self.queue.finished("training"):
            task = self.queue.get("training", "last")
            position, stop = task.position, task.stop
            assert stop is not None
            assert task.done()
            self.count(task, position, stop)
        assert self.counted == ALL_RECORDS
        for kind in ("evaluation", "prediction"):
            while (task := self.queue.get(kind, "last")) is not None:
                assert task.done(0)
                assert task.id not in self.results[task.job]
                self.results[task.job][task.id] = 0
        self.collect()
        assert not self.jobs
        assert self.queue.finished("evaluation")
        assert self.queue.finished("prediction")


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=120, stateful_step_count=40)
pytestmark = pytest.mark.slow
