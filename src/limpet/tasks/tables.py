"""The jobs of a queue: which tasks are open, leased, and complete, and all changes of that.

No locks and no clocks. Sets of task numbers are intervals, so 100,000 tasks take little memory.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Annotated, Any

import msgspec

from limpet.arguments import whole
from limpet.errors import JobFailed, LeaseLost, PlanError, TaskError
from limpet.tasks.spec import KINDS, JobSpec, Kind, parse_spec
from limpet.tasks.task import Report, Task, TaskSource, make_task

Interval = tuple[int, int]
"""The numbers from the first up to, but without, the second."""


class IntervalSet:
    """A set of ints, stored as sorted disjoint intervals, about as many as there are workers, which
    complete tasks roughly in order. ``add`` and ``in`` take O(log n) steps."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        pairs = [*intervals]
        self._starts = [start for start, _ in pairs]
        self._stops = [stop for _, stop in pairs]
        self._length = sum(self._stops) - sum(self._starts)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, number: int) -> bool:
        i = bisect_right(self._starts, number) - 1
        return i >= 0 and number < self._stops[i]

    def __iter__(self) -> Iterator[Interval]:
        """Yield the intervals in order, none of which touches the next one."""
        return zip(self._starts, self._stops)

    def add(self, number: int) -> None:
        """Add a number that is not in the set."""
        i = bisect_right(self._starts, number)
        joins_left = i > 0 and self._stops[i - 1] == number
        joins_right = i < len(self._starts) and self._starts[i] == number + 1
        if joins_left and joins_right:
            self._stops[i - 1] = self._stops.pop(i)
            del self._starts[i]
        elif joins_left:
            self._stops[i - 1] = number + 1
        elif joins_right:
            self._starts[i] = number
        else:
            self._starts.insert(i, number)
            self._stops.insert(i, number + 1)
        self._length += 1

    def gaps(self, stop: int) -> Iterator[Interval]:
        """Yield the intervals of the numbers below ``stop`` that are not in the set."""
        start = 0
        for taken, end in self:
            if start < taken:
                yield start, taken
            start = end
        if start < stop:
            yield start, stop


# -- the tasks of one job --------------------------------------------------------------------------


_Number = Annotated[int, msgspec.Meta(ge=0)]


class JobState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress of a job, as the state of a queue has it. The rows are in order."""

    spec: str
    first_id: Annotated[int, msgspec.Meta(ge=1)]
    completed: list[tuple[_Number, _Number]]
    positions: list[tuple[_Number, _Number]]
    results: list[tuple[_Number, str]]


class QueueState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a queue. Its jobs are in the order of their ids."""

    next_id: int
    jobs: list[JobState]


_DECODER = msgspec.msgpack.Decoder(QueueState)


class TaskTable:
    """The tasks of a job, numbered from 0; their ids begin with ``first_id``. Only what steps have
    consumed and tasks have returned is in the state: there, a leased task is open."""

    def __init__(self, spec: JobSpec, first_id: int) -> None:
        self.spec = spec
        self.first_id = first_id
        self.error: TaskError | None = None  # the job has failed, or is no longer in the queue
        self.leases: dict[int, TaskLease] = {}
        self.is_blocked = False  # by the job of ``spec.after``
        self.is_ready = False  # the queue has it in the list of jobs with open tasks
        self.is_touched = False  # a task was leased
        self._set_progress(IntervalSet(), {}, {})

    def _set_progress(
        self, completed: IntervalSet, positions: dict[int, int], results: dict[int, str]
    ) -> None:
        self.completed, self.positions, self.results = completed, positions, results
        self.failures: dict[int, int] = {}  # attempts in a row that consumed nothing
        self.open = [*self.completed.gaps(self.spec.tasks)]
        """A heap of intervals of open tasks, which are in order."""

        self.leases.clear()

    @property
    def is_complete(self) -> bool:
        return len(self.completed) == self.spec.tasks

    @property
    def has_ended(self) -> bool:
        return self.error is not None or self.is_complete

    @property
    def last_id(self) -> int:
        return self.first_id + self.spec.tasks - 1

    def position(self, number: int) -> int:
        """Return the first record of a task that no step has consumed."""
        found = self.positions.get(number)
        return self.spec.range_of(number).start if found is None else found

    # -- changes ---------------------------------------------------------------------------------

    def take(self) -> int | None:
        """Remove the lowest open task and return it, or None if there is none."""
        while self.open:
            number, stop = heappop(self.open)
            if number + 1 < stop:
                heappush(self.open, (number + 1, stop))
            if number not in self.completed:  # a late result of an older attempt
                return number
        return None

    def advance(self, number: int, position: int) -> None:
        """Record that steps have consumed a task up to this position."""
        self.positions[number] = position
        self.failures.pop(number, None)

    def complete(self, number: int, result: str | None) -> None:
        self.completed.add(number)
        self.positions.pop(number, None)
        self.failures.pop(number, None)
        if result is not None:
            self.results[number] = result

    def fail(self, error: TaskError) -> None:
        """Hand out no more tasks of the job."""
        self.error = error
        self.leases.clear()
        self.open = []

    # -- state -----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return the progress as plain values, whose size depends on the tasks in progress."""
        return {
            "spec": self.spec.text,
            "first_id": self.first_id,
            "completed": [[start, stop] for start, stop in self.completed],
            "positions": [[number, self.positions[number]] for number in sorted(self.positions)],
            "results": [[number, self.results[number]] for number in sorted(self.results)],
        }

    def load(self, state: JobState) -> None:
        """Replace the progress by that of a state, which ``check_state`` has accepted."""
        self.first_id = state.first_id
        self.error = None
        completed, positions = IntervalSet(state.completed), dict(state.positions)
        self._set_progress(completed, positions, dict(state.results))
        self.is_touched = bool(len(completed) or positions)


def _is_valid(spec: JobSpec, state: JobState) -> bool:
    """Return True if a job can have this progress."""
    bounds = [number for interval in state.completed for number in interval]
    # neither empty nor touching
    if any(a >= b for a, b in itertools.pairwise([-1, *bounds, spec.tasks + 1])):
        return False
    done = IntervalSet(state.completed)
    return (
        _are_sorted(state.positions)
        and _are_sorted(state.results)
        and all(_is_partial(spec, done, *row) for row in state.positions)
        and all(number in done for number, _ in state.results)
        and (spec.kind != "evaluation" or len(state.results) == len(done))
    )


def _are_sorted(rows: Sequence[tuple[int, Any]]) -> bool:
    return all(a[0] < b[0] for a, b in itertools.pairwise(rows))


def _is_partial(spec: JobSpec, completed: IntervalSet, number: int, position: int) -> bool:
    """Return True if a task that is not complete can be at this position."""
    if spec.kind != "training" or number >= spec.tasks or number in completed:
        return False
    _, start, stop, _ = spec.range_of(number)
    return start < position and (stop is None or position < stop)


# -- leases ----------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class TaskLease:
    """The assignment of a task to a worker, from ``begin`` to ``end`` on the queue's clock. A
    report extends it to ``seconds``. ``position``: the first record not consumed at its begin."""

    attempt: int
    worker: str
    table: TaskTable
    number: int
    position: int
    begin: float
    seconds: float
    end: float


# -- all jobs --------------------------------------------------------------------------------------


class JobTables:
    """The jobs by name, in order, and the leases of their tasks. A lease takes the lowest open task
    of the first job with one, unless it is blocked: O(log n) steps, and a look at each lease."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self.next_id = 1
        self.longest: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._next_attempt = self._first_attempt = 1  # older attempts are of before a load
        self._clear()

    def _clear(self) -> None:
        self.has_news = True  # a task may be open, or a job has ended, since somebody looked
        self.by_name: dict[str, TaskTable] = {}
        self.leases: dict[int, TaskLease] = {}  # those in force, by attempt
        self._held: dict[tuple[str, Kind], dict[int, TaskLease]] = {}  # by worker
        self.running: dict[Kind, dict[str, TaskTable]] = {kind: {} for kind in KINDS}
        self.failed: dict[str, TaskTable] = {}  # but for evaluations
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
            self.fail(table, _failed_before(table, before.error))
        elif before is not None and table.is_blocked:
            self._blocked.setdefault(before.spec.name, []).append(table)
        else:
            self._list_as_ready(table)

    def remove(self, table: TaskTable) -> None:
        """Remove a job that has ended."""
        if self.by_name.get(table.spec.name) is table:
            del self.by_name[table.spec.name]
            self.failed.pop(table.spec.name, None)

    def replace(self, tables: Iterable[TaskTable], next_id: int) -> None:
        """Replace all jobs. All leases end, and later reports of them are ignored."""
        self._clear()
        self._first_attempt = self._next_attempt
        self.next_id = next_id
        for table in tables:
            self.insert(table)

    # -- leases ----------------------------------------------------------------------------------

    def lease(
        self, kind: Kind, worker: str, now: float, seconds: float, owner: TaskSource
    ) -> Task | None:
        """Lease the first open task of this kind for so many seconds."""
        if (found := self._take(kind)) is None:
            return None
        table, number = found
        records = table.spec.range_of(number)
        position = table.position(number)
        attempt, self._next_attempt = self._next_attempt, self._next_attempt + 1
        table.is_touched = True
        lease = TaskLease(
            attempt=attempt,
            worker=worker,
            table=table,
            number=number,
            position=position,
            begin=now,
            seconds=seconds,
            end=now + seconds,
        )
        self.leases[attempt] = table.leases[number] = lease
        self._held.setdefault((worker, kind), {})[attempt] = lease
        return make_task(
            kind,
            id=table.first_id + number,
            attempt=attempt,
            job=table.spec.name,
            data=records.data,
            start=records.start,
            stop=records.stop,
            epoch=records.epoch,
            position=position,
            owner=owner,
        )

    def _take(self, kind: Kind) -> tuple[TaskTable, int] | None:
        ready = self._ready[kind]
        while ready:
            first_id, name = ready[0]
            table = self.by_name.get(name)
            if table is not None and table.first_id == first_id:
                number = None if table.is_blocked else table.take()
                if number is not None:
                    return table, number
                table.is_ready = False
            heappop(ready)
        return None

    def leases_of(self, worker: str, kind: Kind) -> list[TaskLease]:
        """Return the leases of a worker, oldest first."""
        return list(self._held.get((worker, kind), {}).values())

    def next_end(self) -> float:
        """Return the time at which the next lease ends."""
        return min((lease.end for lease in self.leases.values()), default=inf)

    def overdue(self, now: float) -> list[TaskLease]:
        """Return the leases whose time is over, in the order of their ends."""
        found = [lease for lease in self.leases.values() if lease.end <= now]
        return sorted(found, key=lambda lease: (lease.end, lease.attempt))

    def _end_lease(self, lease: TaskLease) -> None:
        del self.leases[lease.attempt]
        del lease.table.leases[lease.number]
        key = (lease.worker, lease.table.spec.kind)
        del self._held[key][lease.attempt]
        if not self._held[key]:
            del self._held[key]

    def reopen(self, lease: TaskLease) -> None:
        """End a lease without blame: its task is open again."""
        self._end_lease(lease)
        heappush(lease.table.open, (lease.number, lease.number + 1))
        self._list_as_ready(lease.table)

    def renew(self, lease: TaskLease, now: float, seconds: float | None) -> None:
        """Let the time of a lease start anew, with so many seconds if they are given."""
        if seconds is not None:
            lease.seconds = seconds
        lease.end = now + lease.seconds

    def take_back(self, lease: TaskLease, cause: str, is_final: bool = False) -> None:
        """End a lease as a failed attempt: without progress, that uses up one, or all if final."""
        table, number = lease.table, lease.number
        self.reopen(lease)
        if table.position(number) > lease.position:
            return
        failures = table.failures[number] = table.failures.get(number, 0) + 1
        if failures >= self._attempts or is_final:
            self.fail(table, _failed(table, number, failures, cause))

    def complete(
        self, table: TaskTable, number: int, result: str | None, attempt: int, now: float
    ) -> None:
        """Complete a task by the report of an attempt, whoever has leased it now."""
        lease = table.leases.get(number)
        if lease is not None:
            self._end_lease(lease)
            if lease.attempt == attempt:
                kind = table.spec.kind
                self.longest[kind] = max(self.longest[kind], now - lease.begin)
        table.complete(number, result)
        if table.is_complete:
            self.has_news = True
            del self.running[table.spec.kind][table.spec.name]
            for other in self._blocked.pop(table.spec.name, []):
                other.is_blocked = False
                self._list_as_ready(other)

    def fail(self, table: TaskTable, error: TaskError) -> None:
        """Fail a job, and those that wait for it. Their leases end."""
        self.has_news = True
        pending = [(table, error)]
        while pending:
            table, error = pending.pop()
            for lease in list(table.leases.values()):
                self._end_lease(lease)
            table.fail(error)
            kind, name = table.spec.kind, table.spec.name
            del self.running[kind][name]
            if kind != "evaluation":
                self.failed[name] = table
            waiting = self._blocked.pop(name, [])
            pending += [(other, _failed_before(other, error)) for other in waiting]

    def _list_as_ready(self, table: TaskTable) -> None:
        self.has_news = True
        if not table.is_ready and not table.is_blocked and table.error is None:
            table.is_ready = True
            heappush(self._ready[table.spec.kind], (table.first_id, table.spec.name))

    # -- reports ---------------------------------------------------------------------------------

    def lease_of(self, report: Report) -> TaskLease | None:
        """Return the lease of a report, or None if it is over."""
        lease = self.leases.get(report.attempt)
        if lease is None or lease.table.first_id + lease.number != report.task:
            return None
        return lease

    def held(self, report: Report) -> TaskLease:
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
        """Return the task of a report, from any attempt, and None if it has ended already. Raises
        ``TaskError`` for an attempt that was never made."""
        task, attempt = whole(report.task), whole(report.attempt, 1, self._next_attempt - 1)
        if task is None or attempt is None or whole(report.position) is None:
            raise TaskError("A report of an attempt that was never made", found=repr(report)[:300])
        table = self.by_name.get(report.job)
        if table is None or table.has_ended or attempt < self._first_attempt:
            return None
        number = task - table.first_id
        if not 0 <= number < table.spec.tasks or number in table.completed:
            return None
        return table, number

    def advance(self, lease: TaskLease, position: int, now: float) -> None:
        """Set the position of a leased task, and complete it at its end."""
        lease.end = now + lease.seconds
        if position == lease.table.spec.range_of(lease.number).stop:
            self.complete(lease.table, lease.number, None, lease.attempt, now)
        elif position > lease.table.position(lease.number):
            lease.table.advance(lease.number, position)


def check_position(lease: TaskLease, report: Report) -> None:
    """Raise ``TaskError`` unless a training task can be at the position of a report."""
    records = lease.table.spec.range_of(lease.number)
    is_valid = lease.table.spec.kind == "training" and type(report.position) is int
    if not is_valid or not records.start <= report.position <= (records.stop or report.position):
        raise TaskError(
            f"Task {report.task} of job {report.job!r} cannot be at position {report.position!r}:"
            f" it must be a training task, which has records {records.start} to {records.stop}",
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


# -- the state in snapshots ------------------------------------------------------------------------


def to_state(next_id: int, tables: Mapping[str, TaskTable]) -> dict[str, Any]:
    """Return the state of a queue, as ``QueueState`` describes it."""
    return {"next_id": next_id, "jobs": [table.to_state() for table in tables.values()]}


def check_state(state: object) -> tuple[QueueState, list[TaskTable]]:
    """Return a state after complete checks, and new tables for its jobs. Raises ``PlanError``."""
    try:
        loaded = _DECODER.decode(msgspec.msgpack.encode(state))
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as e:
        raise _not_a_state("next_id and jobs", e) from e
    tables, next_id = [], 1
    for job in loaded.jobs:
        spec = parse_spec(job.spec)
        if not _is_valid(spec, job) or job.first_id < next_id:
            expected = f"possible progress of its {spec.tasks} tasks, with ids from {next_id} on"
            raise _not_a_state(f"job {spec.name!r} with {expected}", repr(job)[:200])
        tables.append(TaskTable(spec, job.first_id))
        next_id = tables[-1].last_id + 1
    names = {table.spec.name for table in tables}
    if len(names) < len(tables) or loaded.next_id < next_id:
        raise _not_a_state("different names, and a next_id after all jobs", loaded.next_id)
    return loaded, tables


def match_tables(
    loaded: Sequence[TaskTable], live: Mapping[str, TaskTable]
) -> tuple[list[TaskTable], list[TaskTable]]:
    """Return the tables that receive the progress of a state, those of live jobs if they exist, and
    the live ones that a load drops. Raises ``PlanError`` for another job, or a new one."""
    receiving = []
    for table in loaded:
        own = live.get(table.spec.name)
        if own is not None and own.spec != table.spec:
            raise PlanError(
                f"Job {table.spec.name!r} of the task queue differs from the saved one",
                expected=table.spec.text[:300],
                found=own.spec.text[:300],
                todo="Add it with the saved arguments, or give the new job another name",
            )
        receiving.append(table if own is None else own)  # who waits for it knows of no load
    names = {table.spec.name for table in loaded}
    dropped = [table for name, table in live.items() if name not in names]
    # a job that has not begun is one that the script adds for the first time
    new = [t.spec.name for t in dropped if t.spec.kind != "evaluation" and not t.is_touched]
    if new:
        raise PlanError(
            f"The saved task queue does not have job {new[0]!r}, which would be lost",
            expected="the jobs that the queue had when the version was saved",
            found=f"{len(new)} more that have not begun",
            todo="Add jobs that are new after resume()",
        )
    return receiving, dropped


def _not_a_state(expected: str, found: object) -> PlanError:
    what = "The loaded value is not the state of a task queue"
    return PlanError(what, expected=expected, found=found)
