"""The two sides of a queue. What has one of them cannot ask for tasks of the other kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, cast

from limpet.errors import TaskError
from limpet.tasks.task import EvaluationTask, Owner, Task, TrainingTask

if TYPE_CHECKING:
    from limpet.tasks.spec import Kind


class TaskSource(Owner, Protocol):
    """What hands out tasks: a ``Queue``, or a ``RemoteQueue`` in a worker process."""

    def get(
        self,
        kind: Kind,
        worker: str | None = None,
        timeout: float = 0.0,
        lease_seconds: float | None = None,
    ) -> Task | None: ...
    def finished(self, kind: Kind) -> bool: ...


class TrainingSide:
    """The training tasks of a queue: all that a data pipeline needs.

    A pipeline that reads ahead and could ask for evaluation tasks would take all of them while it
    looks for the next training task (seeds/003, "Problem 1"). It gets this object instead.
    """

    def __init__(self, source: TaskSource) -> None:
        self._source = source

    def get(
        self,
        worker: str | None = None,
        timeout: float = 0.0,
        lease_seconds: float | None = None,
    ) -> TrainingTask | None:
        """Lease a training task: ``Queue.get("training", ...)``."""
        task = self._source.get("training", worker, timeout, lease_seconds)
        return cast("TrainingTask | None", task)

    def finished(self) -> bool:
        """Return ``Queue.finished("training")``."""
        return self._source.finished("training")

    def consume(self, parts: list[tuple[TrainingTask, int]]) -> None:
        """Report the records of one step, which may be of several tasks: all of them, or none.

        Raises as ``TrainingTask.consumed``.
        """
        reports = [
            task.report._replace(position=task.position_after(records)) for task, records in parts
        ]
        self._source.report_consumed(reports)
        for (task, _), report in zip(parts, reports):
            task.position = report.position


class EvaluationSide:
    """The evaluation tasks of a queue, for the training step or for a worker that only evaluates.

    A worker holds at most one of them.
    """

    def __init__(self, source: TaskSource) -> None:
        self._source = source

    def get(self, worker: str | None = None, timeout: float = 0.0) -> EvaluationTask | None:
        """Lease an evaluation task: ``Queue.get("evaluation", ...)``."""
        return cast("EvaluationTask | None", self._source.get("evaluation", worker, timeout))

    def finished(self) -> bool:
        """Return ``Queue.finished("evaluation")``."""
        return self._source.finished("evaluation")

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
