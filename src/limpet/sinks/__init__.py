"""Show events to people and to monitoring systems.

Terms: a *sink* is a callable for ``limpet.attach``, which calls it with the name and the fields
of each event. It accepts unknown events, and events with missing fields.
May import: the root modules and ``format``.
"""

from limpet.sinks.programs import JsonLines, Logging, MLflow, Prometheus, TensorBoard, WandB
from limpet.sinks.terminal import Terminal

__all__ = ["JsonLines", "Logging", "MLflow", "Prometheus", "TensorBoard", "Terminal", "WandB"]
