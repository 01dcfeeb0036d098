"""Work that is handed out in tasks and returned, exactly once, whatever happens to the workers.

Terms: a *task* is a range of records; a *lease* is the assignment of a task to a worker, for a
limited time; an *attempt* is one lease of a task; a *job* is a set of tasks that end together.
May import: the root modules, ``format``, ``ranks``, and ``tasks``, neither snapshots nor stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from limpet.lazy_names import lazy_names

if TYPE_CHECKING:
    from limpet.tasks.batches import TaskBatches as TaskBatches
    from limpet.tasks.queue import Job as Job, Queue as Queue
    from limpet.tasks.remote import RemoteQueue as RemoteQueue, TaskServer as TaskServer
    from limpet.tasks.task import (
        EvaluationSide as EvaluationSide,
        EvaluationTask as EvaluationTask,
        PredictionSide as PredictionSide,
        PredictionTask as PredictionTask,
        Task as Task,
        TrainingSide as TrainingSide,
        TrainingTask as TrainingTask,
    )

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "tasks.batches": "TaskBatches",
        "tasks.queue": "Job Queue",
        "tasks.remote": "RemoteQueue TaskServer",
        "tasks.task": "EvaluationSide EvaluationTask PredictionSide PredictionTask"
        " Task TrainingSide TrainingTask",
    },
)
