"""Work that is handed out in tasks and returned, exactly once, whatever happens to the workers.

Terms: a *task* is a range of records; a *lease* is the assignment of a task to a worker, for a
limited time; an *attempt* is one lease of a task; a *job* is a set of tasks that end together.
May import: the root modules, ``format``, ``ranks``, and ``tasks``. It knows neither
snapshots nor stores.

Each public name is imported on first use, as in ``limpet``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limpet.tasks.batches import TaskBatches
    from limpet.tasks.queue import Job, Queue
    from limpet.tasks.remote import RemoteQueue, TaskServer
    from limpet.tasks.task import EvaluationSide, EvaluationTask, Task, TrainingSide, TrainingTask

__all__ = [
    "EvaluationSide",
    "EvaluationTask",
    "Job",
    "Queue",
    "RemoteQueue",
    "Task",
    "TaskBatches",
    "TaskServer",
    "TrainingSide",
    "TrainingTask",
]

_LAZY_NAMES = {
    "EvaluationSide": "task",
    "EvaluationTask": "task",
    "Job": "queue",
    "Queue": "queue",
    "RemoteQueue": "remote",
    "Task": "task",
    "TaskBatches": "batches",
    "TaskServer": "remote",
    "TrainingSide": "task",
    "TrainingTask": "task",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module 'limpet.tasks' has no attribute {name!r}")
    value = getattr(import_module(f"limpet.tasks.{_LAZY_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
