"""Events for programs: JSON Lines, ``logging``, Prometheus, TensorBoard, and tracking services."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from math import nan
from typing import TYPE_CHECKING, Any

from limpet.arguments import require, whole
from limpet.errors import LimpetError
from limpet.machine import OPEN_FLAGS, full_path
from limpet.sinks.wording import STYLES, bytes_per_second, describe_event, number_field
from limpet.text import advise_install, to_json_value, without_surrogates

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class JsonLines:
    """Appends a JSON object to a file for each event: ``time`` (UTC), ``event``, and its fields.

    Each line is appended with one write. Several threads can therefore share a file, and so can
    several processes on a local disk. The file is opened and closed for each event: a file that was
    moved away is created again. The output is ASCII, and errors are text. ``docs/events.md``
    describes values that JSON cannot represent.

    Parent folders are created. Raises ``OSError`` if the file cannot be opened or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = full_path(path)
        self._clock = clock
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._append(b"\n" if _lacks_newline(self.path) else b"")

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        first = {"time": now, "event": name}
        self._append(json.dumps({**first, **to_json_value(fields), **first}).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | OPEN_FLAGS, 0o666)
        try:
            while line:  # a short write means that the disk is full; the next write raises
                line = line[os.write(file, line) :]
        except OSError as e:
            e.filename = self.path
            raise
        finally:
            os.close(file)


def _lacks_newline(path: str) -> bool:
    """Return True if the last line is incomplete: the disk was full or the machine crashed."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


# -- logging -------------------------------------------------------------------------------------

_LEVELS = {"yellow": logging.WARNING, "bold red": logging.ERROR}
"""The levels of events by their style; that of the others is INFO."""


class Logging:
    """Logs each event that is of interest to people, to the logger with the given name.

    The level is INFO for normal events, WARNING if attention is needed, and ERROR for a failed
    save. A record has the name and fields of the event as ``record.event`` and ``record.fields``.
    """

    def __init__(self, logger: str = "limpet") -> None:
        self._logger = logging.getLogger(logger)

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        level = _LEVELS.get(STYLES.get(name, ""), logging.INFO)
        if name not in STYLES or not self._logger.isEnabledFor(level):
            return
        text = describe_event(name, fields)
        if text is not None:
            self._logger.log(level, "%s", text, extra={"event": name, "fields": fields})


# -- metrics over time ---------------------------------------------------------------------------

_COUNTERS = {
    "saves": "Versions committed",
    "save_failures": "Saves that failed",
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
                todo=advise_install("prometheus"),
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


class TensorBoard:
    """Curves ``limpet/*`` over the training steps, with one point for each save.

    The curves are seconds blocked, seconds in the background, bytes written, bytes referred to, and
    GiB/s. ``writer``: a ``SummaryWriter``, or an object with the same ``add_scalar``. The sink
    calls it from background threads. The program closes the writer.
    """

    def __init__(self, writer: Any) -> None:
        expected = "a writer with add_scalar, such as torch.utils.tensorboard.SummaryWriter"
        require("writer=", callable(getattr(writer, "add_scalar", None)), expected, writer)
        self._writer = writer

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        step = number_field(fields, "step")
        if name != "saved" or step is None:
            return
        for curve, value in numbers_of_save(fields).items():
            self._writer.add_scalar(f"limpet/{curve}", value, int(step))


def numbers_of_save(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a ``saved`` event that curves show, by name, without missing ones."""
    speed = bytes_per_second(fields)
    values = {curve: number_field(fields, field) for field, curve in _FIELD_COUNTERS.items()}
    values["gib_per_second"] = None if speed is None else speed / 2**30
    return {curve: value for curve, value in values.items() if value is not None}


class WandB:
    """Charts ``limpet/*`` over the training steps in Weights & Biases, with a point for each save.

    They are those of ``TensorBoard``, the metrics of the version (``limpet/metrics/*``), and its
    address (``limpet/version``). The summary has the address of the version that was resumed.
    ``run``: what ``wandb.init`` returned. The program finishes it.

    A point is a part of the row that the program logs next, because a row of its own could make
    Weights & Biases refuse rows of the program. Of several points before one row, it has the last.
    """

    def __init__(self, run: Any) -> None:
        is_run = callable(getattr(run, "define_metric", None))
        require("run=", is_run, "the run that wandb.init() returned", run)
        run.define_metric("limpet/*", step_metric="limpet/step")
        self._run = run
        self._row = -1  # that of the program which has our last point
        self._names: set[str] = set()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        step, address, numbers = _numbers_of_version(name, fields)
        if step is None:
            return
        if name == "resumed":
            self._run.summary.update({"limpet/resumed": address})
            return
        point = {**numbers, "limpet/version": address, "limpet/step": step}
        self._run.log(point, commit=False)  # first: the step of a finished run comes after 30 s
        if self._row != (row := self._run.step):
            self._row, self._names = row, set()
        # what only an earlier point of the same row has would count as a value of this one
        if others := self._names - numbers.keys():
            self._run.log(dict.fromkeys(others, nan), commit=False)
        self._names |= numbers.keys()


class MLflow:
    """Charts ``limpet/*`` over the training steps in MLflow, with a point for each save.

    They are those of ``TensorBoard``, and the metrics of the version (``limpet/metrics/*``; ``_``
    replaces what MLflow does not allow in a name). The tags ``limpet.version`` and
    ``limpet.resumed`` are the addresses of the newest version, and of the one that was resumed.
    ``client``: an ``MlflowClient``; ``run_id``: of the program's run, ``run.info.run_id``. MLflow
    sends the values in the background, and logs its failures. The program ends the run.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        is_client = callable(getattr(client, "log_batch", None))
        require("client=", is_client, "an mlflow.MlflowClient()", client)
        require("run_id=", isinstance(run_id, str), "the run.info.run_id of the program", run_id)
        from mlflow.entities import Metric, RunTag

        self._client, self._run_id, self._metric, self._tag = client, run_id, Metric, RunTag

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        step, address, numbers = _numbers_of_version(name, fields)
        if step is None:
            return
        tags = [self._tag("limpet.version" if name == "saved" else "limpet.resumed", address)]
        now, metrics = int(time.time() * 1000), []
        for key, value in numbers.items():
            parts = re.sub(r"[^\w ./-]", "_", key).split("/")
            valid = "/".join(part if part.strip(".") else "_" for part in parts)[:250].rstrip("/")
            metrics.append(self._metric(valid, value, now, step))
        for i in range(0, len(metrics) or 1, 1000):  # that MLflow accepts in one call
            part = metrics[i : i + 1000]
            self._client.log_batch(self._run_id, metrics=part, tags=tags, synchronous=False)


def _numbers_of_version(
    name: str, fields: Mapping[str, Any]
) -> tuple[int | None, str, dict[str, float]]:
    """Return the step, the address of the version, and the numbers by name of a save or a resume;
    the step is None for another event."""
    step, metrics = number_field(fields, "step"), fields.get("metrics")
    if name not in ("saved", "resumed") or step is None:
        return None, "", {}
    parts = ("run", "version") if name == "saved" else ("url",)
    address = "/".join(str(to_json_value(fields.get(part), limit=None)) for part in parts)
    numbers = numbers_of_save(fields) if name == "saved" else {}
    for metric, value in metrics.items() if isinstance(metrics, Mapping) else ():
        if type(value) is float or whole(value, -(2**63), 2**63) is not None:
            numbers[f"metrics/{metric}"] = float(value)
    named = {f"limpet/{name}": number for name, number in numbers.items()}
    return int(step), without_surrogates(address), named
