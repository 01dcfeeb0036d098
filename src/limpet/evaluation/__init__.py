"""Evaluation of the versions of a run by a job of its own, which any number of workers share.

Terms: the *evaluator* is the process that leases tasks to its *workers*, merges what they return,
and records it. The *state* of a metric is what can be merged: a sum and a count, or that of a
torchmetrics ``Metric``.
May import: the root modules, ``format``, ``storage``, ``layout``, ``ranks``, ``state``,
``snapshot``, ``saving``, ``loading``, ``convert``, ``run``, and ``tasks``.
"""

from typing import TYPE_CHECKING

from limpet.lazy_names import lazy_names

if TYPE_CHECKING:
    from limpet.evaluation.options import Selection as Selection
    from limpet.evaluation.options import Workers as Workers
    from limpet.evaluation.worker import TaskEvaluator as TaskEvaluator

__all__, __getattr__, __dir__ = lazy_names(
    __name__, {"evaluation.options": "Selection Workers", "evaluation.worker": "TaskEvaluator"}
)
