"""The queue: hands out tasks, takes them back, and counts every record and every result once.

It is a state machine without threads of its own. Each call first takes back what is overdue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from threading import Condition, RLock, get_ident
from typing import Any, NoReturn

from limpet.arguments import check_count, check_seconds
from limpet.errors import LimpetError, TaskError
from limpet.tasks.spec import KINDS, DataSets, Kind, check_kind, make_spec
from limpet.tasks.tables import (
    JobTables,
    TaskTable,
    check_position,
    check_state,
    match_tables,
    to_state,
)
from limpet.tasks.task import (
    EvaluationSide,
    PredictionSide,
    Report,
    Task,
    TrainingSide,
    decode_result,
    encode_result,
)
from limpet.threads import no_op

_LONGEST_WAIT = 1.0
"""Seconds after which a wait looks at the clock again, which may not be the real one."""


class Queue:
    """Tasks for any number of workers, of the kinds ``"training"``, ``"evaluation"``, and
    ``"prediction"``, each of which is handed out independently of the others.

    ``lease_seconds``: the time after which a task whose worker has not reported returns to the
    queue; None: never. ``attempts``: how many attempts in a row may end without result and without
    progress before the job fails. ``clock`` returns seconds and never goes back.

    Put the queue into the state of a ``Checkpointer``. A version then contains what the steps up to
    it have consumed. Leases and workers are not part of it, so any number of workers can resume.
    All methods may be called from any thread of the process that created the queue.

    Raises ``LimpetError`` for invalid arguments.
    """

    def __init__(
        self,
        *,
        lease_seconds: float | None = 600.0,
        attempts: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        seconds = inf if lease_seconds is None else lease_seconds
        self.lease_seconds = check_seconds("lease_seconds=", seconds, may_be_infinite=True)
        attempts = check_count("attempts=", attempts)
        self._clock = clock
        self._changed = Condition(RLock())
        self._process = os.getpid()
        self._jobs = JobTables(attempts)
        self.training = TrainingSide(self)
        self.evaluation = EvaluationSide(self)
        self.prediction = PredictionSide(self)
        self.on_overdue: Callable[[str], object] = no_op
        """Called with the name of a worker that has not reported within the time of its lease. It
        must neither wait nor raise."""

    def __repr__(self) -> str:
        return (
            f"<Queue with {len(self._jobs.by_name)} jobs, {len(self._jobs.leases)} tasks at work>"
        )

    def __reduce__(self) -> NoReturn:
        raise LimpetError(
            "A task queue cannot be copied to another process: use a TaskServer and a RemoteQueue,"
            " or a DataLoader whose batch_sampler is a TaskBatches"
        )

    # -- jobs ------------------------------------------------------------------------------------

    def add(
        self,
        kind: Kind,
        data: DataSets,
        *,
        task_size: int,
        epochs: int = 1,
        name: str,
        after: str | None = None,
    ) -> Job:
        """Add a job: all records of ``data``, ``epochs`` times, in tasks of ``task_size`` records.

        ``data``: the number of records, or a mapping of names of data sets, files, or streams to
        their number of records, a ``range``, or None (a stream: one task without a known end). The
        last task of a data set has the remainder. A task size is usually that of a batch times the
        number of batches. ``after``: the job that must be complete before this one begins.

        If the queue has this job already, such as after a resume, it is returned as it is. Raises
        ``TaskError`` if the queue has another job with this name, and ``LimpetError`` for invalid
        arguments.
        """
        spec = make_spec(kind, data, task_size, epochs, name, after)
        with self._entered():
            table = self._jobs.by_name.get(name)
            if table is None:
                if after is not None and after not in self._jobs.by_name:
                    what = f"Job {name!r} cannot wait for job {after!r}, which is not in the queue"
                    raise TaskError(what, job=name)
                table = TaskTable(spec, self._jobs.next_id)
                self._jobs.next_id = table.last_id + 1
                self._jobs.insert(table)
            elif table.spec != spec:
                raise TaskError(
                    f"The queue has another job with the name {name!r}",
                    expected=table.spec.text[:300],
                    found=spec.text[:300],
                    todo="Use another name, or a new run for other data",
                    job=name,
                )
            return Job(self, table)

    def job(self, name: str) -> Job:
        """Return the job with this name. Raises ``TaskError`` if the queue has none."""
        with self._entered():
            if name not in self._jobs.by_name:
                raise TaskError(f"The queue has no job with the name {name!r}", job=name)
            return Job(self, self._jobs.by_name[name])

    def jobs(self) -> list[Job]:
        """Return all jobs but for those that nobody waits for any more."""
        with self._entered():
            return [Job(self, table) for table in self._jobs.by_name.values()]

    def finished(self, kind: Kind) -> bool:
        """Return True if no task of this kind is open or leased.

        Then, raises the ``JobFailed`` of a job that has failed: a training, or a prediction, would
        end as if it were complete. That of an evaluation is raised to whoever waits for its job.
        """
        check_kind(kind)
        with self._entered():
            if self._jobs.running[kind]:
                return False
            for table in self._jobs.failed.values():
                if table.spec.kind == kind and table.error is not None:
                    raise table.error
            return True

    def longest_seconds(self, kind: Kind) -> float:
        """Return the longest time that a completed attempt of this kind took, to set timeouts."""
        return self._jobs.longest[check_kind(kind)]

    # -- workers ---------------------------------------------------------------------------------

    def get(
        self,
        kind: Kind,
        worker: str | None = None,
        timeout: float = 0.0,
        lease_seconds: float | None = None,
    ) -> Task | None:
        """Lease the first open task of this kind, or return None if there is none.

        ``worker``: the name of the worker, by default one for each thread. ``timeout``: the seconds
        to wait for a task. ``lease_seconds``: instead of that of the queue; infinity for a worker
        that cannot be lost unless the queue is.

        A worker holds at most one evaluation task, and one prediction task: if it asks for another
        one, its last attempt counts as failed.
        """
        check_kind(kind)
        seconds = self.lease_seconds if lease_seconds is None else lease_seconds
        timeout = check_seconds("timeout=", timeout, may_be_zero=True)
        seconds = check_seconds("lease_seconds=", seconds, may_be_infinite=True)
        worker = f"thread {get_ident()}" if worker is None else worker
        with self._entered():
            end = self._clock() + timeout
            if kind != "training":
                for lease in self._jobs.leases_of(worker, kind):
                    self._jobs.take_back(lease, f"worker {worker!r} asked for another task")
            while True:
                now = self._clock()
                task = self._jobs.lease(kind, worker, now, seconds, self)
                if task is not None or now >= end:
                    return task
                self._wait(end)

    def get_soon(
        self, kind: Kind, worker: str, seconds: float, lease_seconds: float | None
    ) -> Task | None:
        """Lease a task for a worker of another process, as ``get``. Without one, wait on the real
        clock for news, or until a lease is over."""
        with self._changed:
            task = self.get(kind, worker, 0.0, lease_seconds)
            if task is None and seconds > 0:
                until_end = self._jobs.next_end() - self._clock()
                self._changed.wait(min(seconds, max(until_end, 0.0)))
                task = self.get(kind, worker, 0.0, lease_seconds)
            return task

    def wake(self) -> None:
        """Let all who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def recover(self, worker: str, cause: str = "it has ended") -> int:
        """Return the tasks of a lost worker to the queue. Returns their number.

        Only the attempt that the worker began first counts as failed, of each kind: it was at work
        on that task, and had merely read ahead in the others.
        """
        with self._entered():
            count = 0
            for kind in KINDS:
                leases = self._jobs.leases_of(worker, kind)
                for lease in leases[:1]:
                    self._jobs.take_back(lease, f"worker {worker!r} was lost: {cause}")
                for lease in leases[1:]:
                    if self._jobs.leases.get(lease.attempt) is lease:  # its job has not failed
                        self._jobs.reopen(lease)
                count += len(leases)
            return count

    # -- reports of workers, see ``Task`` --------------------------------------------------------

    def report_consumed(self, reports: Sequence[Report]) -> None:
        """Set the positions of different tasks, all or none. See ``TrainingTask.consumed``."""
        if len({report.attempt for report in reports}) < len(reports):
            raise TaskError("A step reports the records of one task twice, not their sum")
        with self._entered():
            leases = [self._jobs.held(report) for report in reports]
            for lease, report in zip(leases, reports):
                check_position(lease, report)
            now = self._clock()
            for lease, report in zip(leases, reports):
                self._jobs.advance(lease, report.position, now)

    def report_done(self, report: Report, result: Any) -> bool:
        """Complete a task. See ``done`` of its class."""
        text = encode_result(result)
        with self._entered():
            found = self._jobs.unfinished(report)
            if found is None:
                return False
            table, number = found
            if report.position != table.position(number):
                return False  # a newer attempt has consumed records
            # of a prediction, there may be millions without one
            is_kept = table.spec.kind == "evaluation" or result is not None
            kept = text if is_kept and table.spec.kind != "training" else None
            self._jobs.complete(table, number, kept, report.attempt, self._clock())
            return True

    def report_failed(self, report: Report, cause: str, is_final: bool = False) -> bool:
        """End an attempt as failed. See ``Task.fail``."""
        with self._entered():
            lease = self._jobs.lease_of(report)
            if lease is not None:
                self._jobs.take_back(lease, cause[:10_000], is_final)
            return lease is not None

    def report_released(self, report: Report) -> bool:
        """End an attempt without blame. See ``Task.release``."""
        with self._entered():
            lease = self._jobs.lease_of(report)
            if lease is not None:
                self._jobs.reopen(lease)
            return lease is not None

    def renew(self, report: Report, seconds: float | None = None) -> None:
        """Start the time of a lease anew. See ``Task.renew``."""
        if seconds is not None:
            seconds = check_seconds("seconds=", seconds)
        with self._entered():
            self._jobs.renew(self._jobs.held(report), self._clock(), seconds)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the steps so far have consumed, and the results of jobs that nobody has
        collected: plain values that do not depend on workers and leases."""
        with self._entered():
            return to_state(self._jobs.next_id, self._jobs.by_name)

    def check_state_dict(self, state: object) -> None:
        """Raise the error that ``load_state_dict`` would raise. A load calls this first."""
        with self._entered():
            match_tables(check_state(state)[1], self._jobs.by_name)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state: what it does not contain as completed is open again.

        All leases end, and later reports of their attempts are ignored. Jobs that the queue has,
        and that the state does not have, end with an error. Raises ``PlanError``, and changes
        nothing, if that would lose a training or a prediction that has not begun, or if a job
        differs.
        """
        with self._entered():
            loaded, tables = check_state(state)
            receiving, dropped = match_tables(tables, self._jobs.by_name)
            for table in dropped:
                what = f"A load has removed job {table.spec.name!r} from the queue"
                table.fail(TaskError(what, todo="Add it again", job=table.spec.name))
            for table, progress in zip(receiving, loaded.jobs):
                table.load(progress)
            self._jobs.replace(receiving, loaded.next_id)

    # -- implementation --------------------------------------------------------------------------

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Lock the queue, and first take back what is overdue."""
        if os.getpid() != self._process:
            self.__reduce__()
        with self._changed:
            self._take_back_overdue()
            try:
                yield
            finally:
                self._notify()

    def _take_back_overdue(self) -> None:
        for lease in self._jobs.overdue(self._clock()):
            if lease.attempt not in self._jobs.leases:  # its job has failed meanwhile
                continue
            cause = f"no report of worker {lease.worker!r} within {lease.seconds} s"
            self._jobs.take_back(lease, cause)
            self.on_overdue(lease.worker)

    def _notify(self) -> None:
        """Wake up those who wait, if there is something for them."""
        if self._jobs.has_news:
            self._jobs.has_news = False
            self._changed.notify_all()

    def _wait(self, end: float) -> None:
        """Wait for news until ``end``, or until a lease is over."""
        self._notify()
        seconds = min(end, self._jobs.next_end()) - self._clock()
        self._changed.wait(min(max(seconds, 0.0), _LONGEST_WAIT))
        self._take_back_overdue()


class Job:
    """The tasks that one ``Queue.add`` has added."""

    def __init__(self, owner: Queue, table: TaskTable) -> None:
        self._owner, self._table = owner, table

    def __repr__(self) -> str:
        return f"<Job {self.name!r}: {self.completed} of {self.tasks} tasks completed>"

    @property
    def name(self) -> str:
        return self._table.spec.name

    @property
    def kind(self) -> Kind:
        return self._table.spec.kind

    @property
    def tasks(self) -> int:
        """The number of tasks, in all epochs."""
        return self._table.spec.tasks

    @property
    def completed(self) -> int:
        """The number of tasks that are complete."""
        return len(self._table.completed)

    @property
    def error(self) -> TaskError | None:
        """The reason why the job failed, or None."""
        return self._table.error

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Wait at most ``timeout`` seconds; return if all is complete, or the job has failed."""
        timeout = check_seconds("timeout=", timeout, may_be_zero=True)
        queue, table = self._owner, self._table
        with queue._entered():
            end = queue._clock() + timeout
            while not table.has_ended and queue._clock() < end:
                queue._wait(end)
            return table.has_ended

    def cancel(self) -> None:
        """End a job but for a training, if it has not ended: its tasks are handed out no more."""
        jobs, table = self._owner._jobs, self._table
        with self._owner._entered():
            if not table.has_ended and jobs.by_name.get(self.name) is table:
                jobs.fail(table, TaskError(f"Job {self.name!r} was canceled"))
            self._forget()

    def _forget(self) -> None:
        """Remove a job that has ended from the queue. This object keeps its results."""
        if self.kind != "training":
            self._owner._jobs.remove(self._table)

    def wait(self, timeout: float) -> None:
        """Wait for at most ``timeout`` seconds until all tasks are complete.

        Raises ``JobFailed`` if a task has used up its attempts, and ``TaskError`` after the time,
        or if a load has replaced the jobs of the queue. A job but for a training leaves the queue
        with this call once it has ended: its name is free again.
        """
        table = self._table
        if not self.has_ended(timeout):
            raise TaskError(
                f"Job {self.name!r} did not end within {timeout} s: {self.completed} of"
                f" {self.tasks} tasks are complete, and {len(table.leases)} at work",
                job=self.name,
            )
        with self._owner._entered():
            self._forget()
        if table.error is not None:
            raise table.error

    def results(self) -> list[Any]:
        """Return the results of all tasks, in the order of their ids: one of each, None for a
        prediction without one. Raises ``TaskError`` until the job has ended, and as ``wait``.
        Training tasks have none."""
        self.wait(0.0)
        texts = self._table.results
        numbers = range(0 if self.kind == "training" else self.tasks)
        return [decode_result(texts.get(number, "null")) for number in numbers]
