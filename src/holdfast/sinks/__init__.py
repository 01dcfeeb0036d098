"""How events are shown to people and monitoring systems: sinks for ``holdfast.attach``.

A sink is called with the name and the fields of an event. It ignores events that it does not know,
and it accepts events with missing fields.
May import: the root modules and ``format``.
"""

from holdfast.sinks.jsonlines import JsonLines
from holdfast.sinks.logs import Logging
from holdfast.sinks.meters import Prometheus, TensorBoard
from holdfast.sinks.terminal import Terminal

__all__ = ["JsonLines", "Logging", "Prometheus", "TensorBoard", "Terminal"]
