"""A leased task, as its worker sees it. Reports go to the queue, in this process or in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from limpet.errors import TaskError
from limpet.tasks.spec import is_int
from limpet.text import without_surrogates

if TYPE_CHECKING:
    from collections.abc import Sequence


class Report(NamedTuple):
    """What every report of a worker contains.

    ``position``: the first record of the task that no step has consumed, as the worker knows it. It
    is absolute, so that a report that arrives twice has the effect of one.
    """

    job: str
    task: int
    attempt: int
    position: int


class Owner(Protocol):
    """What receives the reports on tasks: a ``Queue``, or a ``RemoteQueue`` that sends them on."""

    def report_consumed(self, reports: Sequence[Report]) -> None: ...
    def report_done(self, report: Report, result: Any) -> bool: ...
    def report_failed(self, report: Report, cause: str, is_final: bool = False) -> bool: ...
    def report_released(self, report: Report) -> bool: ...
    def renew(self, report: Report, seconds: float | None = None) -> None: ...


@dataclass(eq=False)
class Task:
    """Records of a data set that one worker has leased.

    ``id``: from 1, the same in every attempt. ``attempt``: the number of the lease, which no other
    lease of the queue has. ``job``: the name of its job. ``data``: the name of the data set.
    ``start`` and ``stop``: the range of records. ``epoch``: from 0. ``position``: the first record
    that no step has consumed; work begins there.
    """

    id: int
    attempt: int
    job: str
    data: str
    start: int
    stop: int | None
    epoch: int
    position: int
    owner: Owner

    @property
    def report(self) -> Report:
        return Report(self.job, self.id, self.attempt, self.position)

    def fail(self, error: BaseException | str, *, final: bool = False) -> bool:
        """Report that the attempt failed. The task returns to the queue, or fails its job if it has
        no attempt left, or if this one is ``final``: others would fail, too. Returns whether the
        report counts: one of an older attempt does not."""
        cause = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return self.owner.report_failed(self.report, without_surrogates(cause), final)

    def release(self) -> bool:
        """Return the task to the queue because the worker leaves; it does not count as a failure.

        Returns whether the report counts, as ``fail``.
        """
        return self.owner.report_released(self.report)

    def renew(self, seconds: float | None = None) -> None:
        """Start the time of the lease anew, with ``seconds`` from now on if they are given.

        Raises ``LeaseLost`` if the lease is over.
        """
        self.owner.renew(self.report, seconds)


@dataclass(eq=False)
class TrainingTask(Task):
    """A task whose records the training consumes, step by step.

    ``stop`` is None for a stream, whose task ends with ``done``.
    """

    @property
    def records_left(self) -> int | None:
        """The number of records that no step has consumed; None for a stream."""
        return None if self.stop is None else self.stop - self.position

    def consumed(self, records: int) -> None:
        """Report that a step has consumed the next ``records`` records. The last ones complete the
        task.

        Call it in the step, not where the records are read: a reader runs ahead. Call it right
        before the optimizer applies the step: if the lease is over, another worker gets these
        records, and this raises ``LeaseLost``. Also renews the lease. Raises ``TaskError`` for a
        number of records that the task does not have.
        """
        position = self.position_after(records)
        self.owner.report_consumed([self.report._replace(position=position)])
        self.position = position

    def position_after(self, records: int) -> int:
        """Return the position after more records. Raises ``TaskError`` if there are not as many."""
        left = self.records_left
        if not is_int(records) or records < 1 or (left is not None and records > left):
            raise TaskError(
                f"Invalid number of consumed records of task {self.id} of job {self.job!r}",
                expected=f"an int from 1 to {left}" if left is not None else "an int of 1 or more",
                found=repr(records)[:200],
                todo="Report each batch of the task once",
            )
        return self.position + int(records)

    def done(self) -> bool:
        """Report that the whole task is complete: its other records count as consumed.

        Returns whether the report counts: not if the task is complete already, or if a newer
        attempt has consumed records of it.
        """
        return self.owner.report_done(self.report, None)


@dataclass(eq=False)
class EvaluationTask(Task):
    """A task of an evaluation. Its result covers all of its records, ``start`` up to ``stop``."""

    stop: int

    def done(self, result: Any) -> bool:
        """Report the result: None, bools, numbers, texts, and lists and dicts (with texts as keys)
        of these. Returns whether it counts: the first result of a task does, from any attempt.

        Raises ``TaskError`` for another result.
        """
        return self.owner.report_done(self.report, result)
