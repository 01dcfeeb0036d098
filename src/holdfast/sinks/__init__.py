"""What a person sees of a training's saves: sinks for ``holdfast.attach``.

Each passes over events that it does not know and fields that are missing.
"""

from holdfast.sinks.jsonlines import JsonLines
from holdfast.sinks.logs import Logging
from holdfast.sinks.meters import Prometheus, TensorBoard
from holdfast.sinks.terminal import Terminal

__all__ = ["JsonLines", "Logging", "Prometheus", "TensorBoard", "Terminal"]
