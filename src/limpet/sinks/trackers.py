"""Events in a tracking service, through the program's own run there: Weights & Biases, MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from math import nan
from typing import Any

from limpet.arguments import require, whole
from limpet.sinks.programs import numbers_of_save
from limpet.sinks.wording import number_field
from limpet.text import to_json_value, without_surrogates


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
        step, address, numbers = _read(name, fields)
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
        step, address, numbers = _read(name, fields)
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


def _read(name: str, fields: Mapping[str, Any]) -> tuple[int | None, str, dict[str, float]]:
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
