"""A job: tasks that end together. Whoever added it waits for it here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from limpet.errors import TaskError
from limpet.tasks.result import decode_result

if TYPE_CHECKING:
    from limpet.tasks.spec import Kind
    from limpet.tasks.table import TaskTable


class JobOwner(Protocol):
    """The queue that has a job."""

    def wait_for_end(self, table: TaskTable, timeout: float) -> None: ...
    def collect(self, table: TaskTable) -> None: ...


class Job:
    """The tasks that one ``Queue.add`` has added."""

    def __init__(self, owner: JobOwner, table: TaskTable) -> None:
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

    def wait(self, timeout: float) -> None:
        """Wait for at most ``timeout`` seconds until all tasks are complete.

        Raises ``JobFailed`` if a task has used up its attempts, and ``TaskError`` after the time,
        or if a load has replaced the jobs of the queue. An evaluation job leaves the queue with
        this call once it has ended: its name is free again.
        """
        table = self._table
        self._owner.wait_for_end(table, timeout)
        if not table.has_ended:
            raise TaskError(
                f"Job {self.name!r} did not end within {timeout} s",
                expected=f"{self.tasks} completed tasks",
                found=f"{self.completed}, and {len(table.leases)} at work",
                todo="Allow more time, or check that workers ask for its tasks",
                job=self.name,
            )
        self._owner.collect(table)
        if table.error is not None:
            raise table.error

    def results(self) -> list[Any]:
        """Return the results of all tasks, in the order of their ids: one of each.

        Raises ``TaskError`` until the job has ended, and as ``wait``. Training tasks have none.
        """
        self.wait(0.0)
        texts = self._table.results
        return [decode_result(texts[number]) for number in sorted(texts)]
