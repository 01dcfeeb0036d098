"""A leased task, its reports, and its result, as its worker sees them.

Reports go to the queue, in this process or in another. Results are JSON text: what a worker sends
cannot run code, or change on its way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

from limpet.arguments import whole
from limpet.errors import TaskError
from limpet.tasks.spec import Kind
from limpet.text import to_repr, without_surrogates

_MAX_DEPTH = 64


class Report(NamedTuple):
    """What every report of a worker contains. ``position``: the first record that no step has
    consumed, absolute, so that a report that arrives twice has the effect of one."""

    job: str
    task: int
    attempt: int
    position: int


class TaskSource(Protocol):
    """What hands out tasks and receives reports: a ``Queue``, or a ``RemoteQueue`` in a worker."""

    def get(
        self,
        kind: Kind,
        worker: str | None = None,
        timeout: float = 0.0,
        lease_seconds: float | None = None,
    ) -> Task | None: ...
    def finished(self, kind: Kind) -> bool: ...
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
    owner: TaskSource

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
        """Return the task to the queue because the worker leaves, without a failure. Returns
        whether the report counts, as ``fail``."""
        return self.owner.report_released(self.report)

    def renew(self, seconds: float | None = None) -> None:
        """Start the time of the lease anew, with ``seconds`` from now on if they are given. Raises
        ``LeaseLost`` if the lease is over."""
        self.owner.renew(self.report, seconds)


@dataclass(eq=False)
class TrainingTask(Task):
    """A task whose records the training consumes, step by step. ``stop`` is None for a stream,
    whose task ends with ``done``."""

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
        if (count := whole(records, 1, left)) is None:
            most = "or more" if left is None else f"to {left}"
            raise TaskError(
                f"Invalid number of consumed records of task {self.id} of job {self.job!r}: it must"
                f" be 1 {most}, not {to_repr(records)}"
            )
        return self.position + count

    def done(self) -> bool:
        """Report that the whole task is complete: its other records count as consumed. Returns
        whether it counts: not if it is complete, or if a newer attempt has consumed records."""
        return self.owner.report_done(self.report, None)


@dataclass(eq=False)
class EvaluationTask(Task):
    """A task of an evaluation. Its result covers all of its records, ``start`` up to ``stop``."""

    stop: int

    def done(self, result: Any) -> bool:
        """Report the result: None, bools, numbers, texts, and lists and dicts (with texts as keys)
        of these, or raise ``TaskError``. Returns whether it counts: the first of a task does."""
        return self.owner.report_done(self.report, result)


@dataclass(eq=False)
class PredictionTask(Task):
    """A task of a prediction, whose worker stores the output itself. Several attempts may store
    that of one task, even at the same time: store it under the ``id`` of the task, as a whole."""

    stop: int

    def done(self, result: Any = None) -> bool:
        """Report that the output of all records is stored, with a small result such as their
        number, as for ``EvaluationTask.done``. Returns whether it counts, as the first does."""
        return self.owner.report_done(self.report, result)


def make_task(kind: Kind, **fields: Any) -> Task:
    others = EvaluationTask if kind == "evaluation" else PredictionTask
    return (TrainingTask if kind == "training" else others)(**fields)


# -- the sides of a queue --------------------------------------------------------------------------


_T = TypeVar("_T", bound=Task)


class _Side(Generic[_T]):
    """The tasks of one kind of a queue."""

    kind: ClassVar[Kind]

    def __init__(self, source: TaskSource) -> None:
        self._source = source

    def get(
        self, worker: str | None = None, timeout: float = 0.0, lease_seconds: float | None = None
    ) -> _T | None:
        """Lease a task of this kind: see ``Queue.get``."""
        return cast("_T | None", self._source.get(self.kind, worker, timeout, lease_seconds))

    def finished(self) -> bool:
        """Return whether no task of this kind is open or leased: see ``Queue.finished``."""
        return self._source.finished(self.kind)


class PredictionSide(_Side[PredictionTask]):
    """The prediction tasks of a queue. A worker holds at most one of them."""

    kind = "prediction"


class TrainingSide(_Side[TrainingTask]):
    """The training tasks of a queue, for a data pipeline: one that could ask for evaluation tasks
    would take all of them while it reads ahead. ``report``: reports what is consumed."""

    kind = "training"

    def __init__(
        self, source: TaskSource, *, report: Callable[[list[Report]], object] | None = None
    ) -> None:
        super().__init__(source)
        self._report = report or source.report_consumed

    def consume(self, parts: list[tuple[TrainingTask, int]]) -> None:
        """Report the records of one step, which may be of several tasks: all of them, or none.
        Raises as ``TrainingTask.consumed``."""
        reports = [
            task.report._replace(position=task.position_after(records)) for task, records in parts
        ]
        self._report(reports)
        for (task, _), report in zip(parts, reports):
            task.position = report.position


class EvaluationSide(_Side[EvaluationTask]):
    """The evaluation tasks of a queue, for the training step or for a worker that only evaluates. A
    worker holds at most one of them."""

    kind = "evaluation"

    def evaluate_one(
        self, evaluate: Callable[[EvaluationTask], Any], worker: str | None = None
    ) -> bool:
        """Evaluate one task if there is one, and report the result. Returns whether there was one.

        Call it before each mini-batch of the training. ``evaluate`` gets the task and returns its
        result. If it raises an ``Exception``, the task fails: the job raises the error to whoever
        waits for it. Anything else that ends it, such as ``Preempted``, releases the task.
        """
        task = self.get(worker)
        if task is None:
            return False
        try:
            task.done(evaluate(task))
        except Exception as e:  # noqa: BLE001  (the job keeps it)
            task.fail(e)
        except BaseException:
            with suppress(TaskError):  # the connection has ended, which also returns the task
                task.release()
            raise
        return True


# -- results ---------------------------------------------------------------------------------------


def encode_result(result: Any) -> str:
    """Return a result as JSON, with NaN and infinities. Raises ``TaskError`` if it is not plain."""
    _check(result, "the result", 0)
    try:
        return json.dumps(result)
    except ValueError as e:
        raise TaskError("A task cannot return an int of so many digits", found=str(e)) from e


def decode_result(text: str) -> Any:
    """Return the result with this text. Raises ``TaskError`` if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as e:
        raise TaskError("The result of a task is not JSON", found=repr(text)[:200]) from e


def _check(value: Any, where: str, depth: int) -> None:
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list and depth < _MAX_DEPTH:
        for item in value:
            _check(item, f"an element of {where}" if depth == 0 else where, depth + 1)
    elif type(value) is dict and depth < _MAX_DEPTH:
        for key, item in value.items():
            if type(key) is not str:
                raise _not_plain(f"a key of {where}", key)
            _check(item, f"{key!r} in {where}" if depth == 0 else where, depth + 1)
    else:
        raise _not_plain(where, value)


def _not_plain(where: str, value: object) -> TaskError:
    return TaskError(
        f"A task cannot return {where}, {to_repr(value)[:100]}, only None, bools, numbers, texts,"
        " and lists and dicts (with texts as keys) of these: convert tensors with .tolist()"
    )
