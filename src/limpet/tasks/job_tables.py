"""The jobs of a queue and their leases: all changes of a task's state. No locks, no clocks."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from limpet.errors import JobFailed, LeaseLost, TaskError
from limpet.tasks.leases import Lease, Leases
from limpet.tasks.spec import KINDS, Kind, is_int
from limpet.tasks.table import TaskTable
from limpet.tasks.task import EvaluationTask, Owner, Report, Task, TrainingTask


class JobTables:
    """The jobs by name, in the order in which they were added, and the leases of their tasks.

    A lease takes the lowest open task of the first job that has one and is not blocked.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self.next_id = 1
        self.longest: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._next_attempt = self._first_attempt = 1  # older attempts are of before a load
        self._clear()

    def _clear(self) -> None:
        self.by_name: dict[str, TaskTable] = {}
        self.leases = Leases()
        self.running: dict[Kind, dict[str, TaskTable]] = {kind: {} for kind in KINDS}
        self.failed: dict[str, TaskTable] = {}  # training jobs
        self._ready: dict[Kind, list[tuple[int, str]]] = {kind: [] for kind in KINDS}
        self._blocked: dict[str, list[TaskTable]] = {}  # by the job for which they wait

    def insert(self, table: TaskTable) -> None:
        """Add a job. It waits for the job of its ``after``, and fails if that has failed."""
        self.by_name[table.spec.name] = table
        before = self.by_name.get(table.spec.after or "")
        table.is_ready = False
        table.is_blocked = before is not None and not before.is_complete
        if table.is_complete:
            return
        self.running[table.spec.kind][table.spec.name] = table
        if before is not None and before.error is not None:
            self._fail(table, _failed_before(table, before.error))
        elif before is not None and table.is_blocked:
            self._blocked.setdefault(before.spec.name, []).append(table)
        else:
            self._list_as_ready(table)

    def remove(self, table: TaskTable) -> None:
        """Remove a job that has ended."""
        if self.by_name.get(table.spec.name) is table:
            del self.by_name[table.spec.name]

    def replace(self, tables: Iterable[TaskTable], next_id: int) -> None:
        """Replace all jobs. All leases end, and later reports of them are ignored."""
        self._clear()
        self._first_attempt = self._next_attempt
        self.next_id = next_id
        for table in tables:
            self.insert(table)

    # -- leases ----------------------------------------------------------------------------------

    def lease(
        self, kind: Kind, worker: str, now: float, seconds: float, owner: Owner
    ) -> Task | None:
        """Lease the first open task of this kind for so many seconds."""
        ready = self._ready[kind]
        while ready:
            first_id, name = ready[0]
            table = self.by_name.get(name)
            if table is not None and table.first_id == first_id:
                number = None if table.is_blocked else table.take()
                if number is not None:
                    return self._begin(table, number, worker, now, seconds, owner)
                table.is_ready = False
            heappop(ready)
        return None

    def _begin(
        self, table: TaskTable, number: int, worker: str, now: float, seconds: float, owner: Owner
    ) -> Task:
        data, start, stop, epoch = records = table.spec.range_of(number)
        position = table.position(number, records)
        attempt, self._next_attempt = self._next_attempt, self._next_attempt + 1
        table.is_touched = True
        times = now, seconds, now + seconds
        self.leases.add(Lease(attempt, worker, table, number, position, *times))
        fields = table.first_id + number, attempt, table.spec.name, data, start
        if table.spec.kind == "training":
            return TrainingTask(*fields, stop, epoch, position, owner)
        return EvaluationTask(*fields, int(stop or 0), epoch, position, owner)

    def reopen(self, lease: Lease) -> None:
        """End a lease without blame: its task is open again."""
        self.leases.remove(lease)
        lease.table.put_back(lease.number)
        self._list_as_ready(lease.table)

    def renew(self, lease: Lease, now: float, seconds: float | None) -> None:
        """Let the time of a lease start anew, with so many seconds if they are given."""
        if seconds is not None:
            lease.seconds = seconds
        lease.extend(now)
        self.leases.push(lease)

    def take_back(self, lease: Lease, cause: str, is_final: bool = False) -> None:
        """End a lease as a failed attempt. Without progress, it uses up one of the attempts, or all
        of them if it is final."""
        table, number = lease.table, lease.number
        self.reopen(lease)
        if self.position(lease) > lease.position:
            return
        failures = table.failures[number] = table.failures.get(number, 0) + 1
        if failures >= self._attempts or is_final:
            self._fail(table, _failed(table, number, failures, cause))

    def complete(
        self, table: TaskTable, number: int, result: str | None, attempt: int, now: float
    ) -> None:
        """Complete a task by the report of an attempt, whoever has leased it now."""
        lease = self.leases.get(table.leases.get(number, 0))
        if lease is not None:
            self.leases.remove(lease)
            if lease.attempt == attempt:
                kind = table.spec.kind
                self.longest[kind] = max(self.longest[kind], now - lease.begin)
        table.complete(number, result)
        if table.is_complete:
            del self.running[table.spec.kind][table.spec.name]
            for other in self._blocked.pop(table.spec.name, []):
                other.is_blocked = False
                self._list_as_ready(other)

    def _fail(self, table: TaskTable, error: TaskError) -> None:
        """Fail a job, and those that wait for it. Their leases end."""
        pending = [(table, error)]
        while pending:
            table, error = pending.pop()
            for attempt in list(table.leases.values()):
                lease = self.leases.get(attempt)
                if lease is not None:
                    self.leases.remove(lease)
            table.fail(error)
            kind, name = table.spec.kind, table.spec.name
            del self.running[kind][name]
            if kind == "training":
                self.failed[name] = table
            waiting = self._blocked.pop(name, [])
            pending += [(other, _failed_before(other, error)) for other in waiting]

    def _list_as_ready(self, table: TaskTable) -> None:
        if not table.is_ready and not table.is_blocked and table.error is None:
            table.is_ready = True
            heappush(self._ready[table.spec.kind], (table.first_id, table.spec.name))

    # -- reports ---------------------------------------------------------------------------------

    def lease_of(self, report: Report) -> Lease | None:
        """Return the lease of a report, or None if it is over."""
        lease = self.leases.get(report.attempt)
        if lease is None or lease.table.first_id + lease.number != report.task:
            return None
        return lease

    def held(self, report: Report) -> Lease:
        """Return the lease of a report. Raises ``LeaseLost`` if it is over."""
        lease = self.lease_of(report)
        if lease is None:
            raise LeaseLost(
                f"The lease of task {report.task} of job {report.job!r} is over",
                expected="a report before the lease ends",
                found=f"attempt {report.attempt}, which is no longer the current one",
                todo="Discard this step and get another task; or use a longer lease_seconds",
                job=report.job,
                task=report.task,
            )
        return lease

    def unfinished(self, report: Report) -> tuple[TaskTable, int] | None:
        """Return the task of a report, from any attempt, and None if it has ended already.

        Raises ``TaskError`` for an attempt that was never made.
        """
        if not all(map(is_int, report[1:])) or not 1 <= report.attempt < self._next_attempt:
            raise TaskError("A report of an attempt that was never made", found=repr(report)[:300])
        table = self.by_name.get(report.job)
        if table is None or table.has_ended or report.attempt < self._first_attempt:
            return None
        number = report.task - table.first_id
        if not 0 <= number < table.spec.tasks or number in table.completed:
            return None
        return table, number

    def position(self, lease: Lease) -> int:
        """Return the first record of a leased task that no step has consumed."""
        table, number = lease.table, lease.number
        return table.position(number, table.spec.range_of(number))

    def advance(self, lease: Lease, position: int, now: float) -> None:
        """Set the position of a leased task, and complete it at its end."""
        lease.extend(now)
        if position == lease.table.spec.range_of(lease.number).stop:
            self.complete(lease.table, lease.number, None, lease.attempt, now)
        elif position > self.position(lease):
            lease.table.advance(lease.number, position)


def check_position(lease: Lease, report: Report) -> None:
    """Raise ``TaskError`` unless a training task can be at the position of a report."""
    records = lease.table.spec.range_of(lease.number)
    is_valid = lease.table.spec.kind == "training" and is_int(report.position)
    if not is_valid or not records.start <= report.position <= (records.stop or report.position):
        raise TaskError(
            f"Task {report.task} of job {report.job!r} cannot be at this position",
            expected=f"a training task, at a record from {records.start} to {records.stop}",
            found=repr(report.position)[:100],
            job=report.job,
        )


def _failed(table: TaskTable, number: int, attempts: int, cause: str) -> JobFailed:
    data, start, stop, epoch = table.spec.range_of(number)
    name, task = table.spec.name, table.first_id + number
    records = f"record {start} on" if stop is None else f"records {start} to {stop - 1}"
    records += f" of data set {data!r}" if data else ""
    return JobFailed(
        f"Job {name!r} failed at task {task}, {records} in epoch {epoch}",
        expected=f"a result, or progress, within {attempts} attempts",
        found=f"in the last attempt: {cause}",
        todo="Find out why these records cannot be processed. Then "
        + ("resume" if table.spec.kind == "training" else "add the job again"),
        job=name,
        task=task,
        attempts=attempts,
        start=start,
        stop=stop,
        cause=cause,
    )


def _failed_before(table: TaskTable, error: TaskError) -> JobFailed:
    fields = {"task": None, "attempts": 0, **error.fields, "job": table.spec.name}
    return JobFailed(
        f"Job {table.spec.name!r} cannot begin, because the job before it has failed",
        expected=f"that job {table.spec.after!r} completes",
        found=str(error),
        **{"cause": str(error), **fields},
    )
