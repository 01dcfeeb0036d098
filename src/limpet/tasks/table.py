"""The tasks of one job: which are open, how far each is, and what they returned. Without locks."""

from __future__ import annotations

import itertools
from typing import Any

from limpet.errors import PlanError, TaskError
from limpet.tasks.intervals import IntervalSet, OpenNumbers
from limpet.tasks.spec import JobSpec, TaskRange

_FIELDS = ("spec", "first_id", "completed", "positions", "results")


class TaskTable:
    """The tasks of a job, numbered from 0; their ids begin with ``first_id``.

    A task is open (nobody has leased it), leased, or completed. Only what steps have consumed and
    what tasks have returned is in the state: an open and a leased task look the same there.
    """

    def __init__(self, spec: JobSpec, first_id: int) -> None:
        self.spec = spec
        self.first_id = first_id
        self.error: TaskError | None = None  # the job has failed, or is no longer in the queue
        self.leases: dict[int, int] = {}  # the attempt that has leased a task
        self.is_blocked = False  # by the job of ``spec.after``
        self.is_ready = False  # the queue has it in the list of jobs with open tasks
        self.is_touched = False  # a task was leased
        self._set_progress(IntervalSet(), {}, {})

    def _set_progress(
        self, completed: IntervalSet, positions: dict[int, int], results: dict[int, str]
    ) -> None:
        self.completed, self.positions, self.results = completed, positions, results
        self.failures: dict[int, int] = {}  # attempts in a row that consumed nothing
        self._open = OpenNumbers(self.completed.gaps(self.spec.tasks))
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

    def position(self, number: int, records: TaskRange) -> int:
        """Return the first record of a task that no step has consumed."""
        return self.positions.get(number, records.start)

    # -- changes ---------------------------------------------------------------------------------

    def take(self) -> int | None:
        """Remove the lowest open task and return it, or None if there is none."""
        while self._open:
            number = self._open.pop()
            if number not in self.completed:  # a late result of an older attempt
                return number
        return None

    def put_back(self, number: int) -> None:
        """Make a leased task open again."""
        self._open.add(number)

    def advance(self, number: int, position: int) -> None:
        """Record that steps have consumed a task up to this position."""
        self.positions[number] = position
        self.failures.pop(number, None)

    def complete(self, number: int, result: str | None) -> None:
        """Record that a task is complete."""
        self.completed.add(number)
        self.positions.pop(number, None)
        self.failures.pop(number, None)
        if result is not None:
            self.results[number] = result

    def fail(self, error: TaskError) -> None:
        """Hand out no more tasks of the job."""
        self.error = error
        self.leases.clear()
        self._open = OpenNumbers(())

    # -- state -----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return the progress as plain values, whose size depends on the tasks in progress."""
        positions = [[number, self.positions[number]] for number in sorted(self.positions)]
        results = [[number, self.results[number]] for number in sorted(self.results)]
        completed = [[start, stop] for start, stop in self.completed]
        values = self.spec.text, self.first_id, completed, positions, results
        return dict(zip(_FIELDS, values))

    def load(self, state: dict[str, Any]) -> None:
        """Replace the progress by that of a state, which ``check_progress`` has accepted."""
        self.first_id = state["first_id"]
        self.error = None
        completed = IntervalSet((start, stop) for start, stop in state["completed"])
        positions = dict(state["positions"])
        results = dict(state["results"])
        self._set_progress(completed, positions, results)
        self.is_touched = bool(len(completed) or positions)


def check_progress(spec: JobSpec, state: object) -> None:
    """Raise ``PlanError`` unless ``state`` is the state of a ``TaskTable`` of this job."""
    if not isinstance(state, dict) or set(state) != set(_FIELDS) or not _is_valid(spec, state):
        raise PlanError(
            f"The state of a task queue contains progress that job {spec.name!r} cannot have",
            expected=f"{', '.join(_FIELDS)} of {spec.tasks} tasks",
            found=repr(state)[:200],
        )


def _is_valid(spec: JobSpec, state: dict[str, Any]) -> bool:
    lists = [state[name] for name in _FIELDS[2:]]
    if type(state["first_id"]) is not int or state["first_id"] < 1:
        return False
    if not all(
        type(rows) is list and all(type(row) is list and len(row) == 2 for row in rows)
        for rows in lists
    ):
        return False
    completed, positions, results = lists
    numbers = [*(row[0] for row in positions), *(row[0] for row in results)]
    numbers += [number for row in completed for number in row]
    if not all(type(n) is int and 0 <= n <= spec.tasks for n in numbers):
        return False
    bounds = [number for row in completed for number in row]
    if any(a >= b for a, b in itertools.pairwise(bounds)):  # neither empty nor touching
        return False
    done = IntervalSet((start, stop) for start, stop in completed)
    return (
        _are_sorted(positions)
        and _are_sorted(results)
        and all(_is_partial(spec, done, *row) for row in positions)
        and all(number in done and type(text) is str for number, text in results)
        and (spec.kind == "training" or len(results) == len(done))
    )


def _are_sorted(rows: list[list[Any]]) -> bool:
    return all(a[0] < b[0] for a, b in itertools.pairwise(rows))


def _is_partial(spec: JobSpec, completed: IntervalSet, number: int, position: object) -> bool:
    """Return True if a task that is not complete can be at this position."""
    if spec.kind != "training" or number >= spec.tasks or number in completed:
        return False
    _, start, stop, _ = spec.range_of(number)
    return type(position) is int and start < position and (stop is None or position < stop)
