"""Events as metrics over time, for Prometheus and TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from limpet.errors import LimpetError
from limpet.sinks.wording import bytes_per_second, number_field

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_COUNTERS = {
    "saves": "Versions committed",
    "save_failures": "Saves that failed",
    "saves_skipped": "Saves skipped because another save was in progress",
    "resumes": "Number of resumes from a version",
    "preemptions": "Exits after a notice that the process will be stopped",
    "written_bytes": "Bytes that saves wrote",
    "referred_bytes": "Bytes in earlier versions that saves referred to",
    "blocked_seconds": "Seconds for which saves blocked training steps",
    "background_seconds": "Seconds that saves took in the background",
}
_GAUGES = {
    "last_step": "Step of the newest version saved or resumed",
    "last_success_timestamp_seconds": "Unix time of the last commit",
}
_EVENT_COUNTERS = {
    "saved": "saves",
    "save_failed": "save_failures",
    "save_skipped": "saves_skipped",
    "resumed": "resumes",
    "preempted": "preemptions",
}
_FIELD_COUNTERS = {
    "bytes": "written_bytes",
    "referred": "referred_bytes",
    "blocked": "blocked_seconds",
    "seconds": "background_seconds",
}


class Prometheus:
    """Counters and gauges ``limpet_*`` in ``registry`` (by default that of the client library).

    The program serves them, for example with ``prometheus_client.start_http_server`` or a push.

    Raises ``LimpetError`` if the client library is not installed, and ``ValueError`` if the
    registry already contains these metrics.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge
        except ImportError as e:
            raise LimpetError(
                "The Prometheus sink needs the package prometheus_client",
                todo='Install it: pip install "limpet[prometheus]"',
            ) from e
        target = REGISTRY if registry is None else registry
        self._clock = clock
        self._counters = {
            n: Counter(f"limpet_{n}", t, registry=target) for n, t in _COUNTERS.items()
        }
        self._gauges = {n: Gauge(f"limpet_{n}", t, registry=target) for n, t in _GAUGES.items()}

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        if name not in _EVENT_COUNTERS:
            return
        self._counters[_EVENT_COUNTERS[name]].inc()
        step = number_field(fields, "step")
        if name in ("saved", "resumed") and step is not None:
            self._gauges["last_step"].set(step)
        if name == "saved":
            self._gauges["last_success_timestamp_seconds"].set(self._clock())
            for field, counter in _FIELD_COUNTERS.items():
                self._counters[counter].inc(number_field(fields, field) or 0)


class ScalarWriter(Protocol):
    """The part of TensorBoard's ``SummaryWriter`` that the sink uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Record one value of a curve."""


class TensorBoard:
    """Curves ``limpet/*`` over the training steps, with one point for each save.

    The curves are seconds blocked, seconds in the background, bytes written, bytes referred to, and
    GiB/s. ``writer``: a ``SummaryWriter``, or an object with the same ``add_scalar``. The sink
    calls it from background threads. The program closes the writer.
    """

    def __init__(self, writer: ScalarWriter) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise LimpetError(
                "Invalid writer for the TensorBoard sink",
                expected="a writer with add_scalar, such as torch.utils.tensorboard.SummaryWriter",
                found=type(writer).__qualname__,
            )
        self._writer = writer

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        step = number_field(fields, "step")
        if name != "saved" or step is None:
            return
        speed = bytes_per_second(fields)
        values = {curve: number_field(fields, field) for field, curve in _FIELD_COUNTERS.items()}
        values["gib_per_second"] = None if speed is None else speed / 2**30
        for curve, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"limpet/{curve}", value, int(step))
