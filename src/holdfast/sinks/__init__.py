"""Show events to people and to monitoring systems.

Terms: a *sink* is a callable for ``holdfast.attach``, which calls it with the name and the fields
of each event. It accepts unknown events, and events with missing fields.
May import: the root modules and ``format``.
"""

from holdfast.sinks.jsonlines import JsonLines
from holdfast.sinks.logs import Logging
from holdfast.sinks.meters import Prometheus, TensorBoard
from holdfast.sinks.terminal import Terminal

__all__ = ["JsonLines", "Logging", "Prometheus", "TensorBoard", "Terminal"]
