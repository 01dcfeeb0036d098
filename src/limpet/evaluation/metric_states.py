"""The states of metrics: what a worker returns for a task, and how the states of tasks are merged.

A state is plain JSON, which cannot run code. Sums are added exactly (``math.fsum``), so the result
does not depend on the order in which tasks end.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from limpet.errors import LimpetError
from limpet.lazy_torch import dtype_name
from limpet.text import to_repr

State = dict[str, Any]

_EXPECTED = 'a dict such as {"loss": (sum, count)}, or with a torchmetrics Metric for each name'


class MetricStates:
    """Collects what ``evaluate`` returns for the batches of a task. It fills ``templates``, which
    live longer, with one ``Metric`` of each name, which knows how its states are merged."""

    def __init__(self, templates: dict[str, Any]) -> None:
        self._templates = templates
        self._pairs: dict[str, tuple[list[float], list[float]]] = {}
        self._states: dict[str, list[dict[str, Any]]] = {}

    def add(self, returned: object, where: str) -> None:
        """Add what ``evaluate`` returned for one batch, and reset each ``Metric``: a function may
        use one for all. ``where`` names it in errors. Raises ``LimpetError`` if it is not valid."""
        if not isinstance(returned, Mapping) or not returned:
            raise _invalid(where, "nothing" if returned is None else to_repr(returned)[:200])
        for name, value in returned.items():
            if not isinstance(name, str):
                raise _invalid(where, f"the name {to_repr(name)[:80]}")
            if hasattr(value, "metric_state"):
                self._add_metric(name, value)
                continue
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise _invalid(where, f"{to_repr(value)[:80]} for {name}")
            sums, counts = self._pairs.setdefault(name, ([], []))
            sums.append(_to_float(value[0], name, where))
            counts.append(_to_float(value[1], name, where))

    def _add_metric(self, name: str, metric: Any) -> None:
        state = {key: _detach(value) for key, value in metric.metric_state.items()}
        if name not in self._templates:
            reductions = metric._reductions.items()
            means = [k for k, r in reductions if getattr(r, "__name__", "") == "dim_zero_mean"]
            if means:
                raise LimpetError(
                    f"The metric {name} cannot be merged exactly, because it averages"
                    f" {', '.join(means)} over parts of any size: return (sum, count) instead"
                )
            self._templates[name] = deepcopy(metric)
        self._states.setdefault(name, []).append(state)
        metric.reset()

    def to_plain(self) -> State:
        """Return the merged state of the task."""
        pairs = {name: [_exact_sum(s), _exact_sum(c)] for name, (s, c) in self._pairs.items()}
        states = {
            name: {key: _encode(v) for key, v in merge(self._templates[name], found).items()}
            for name, found in self._states.items()
        }
        return {"pairs": pairs, "states": states}


def compute(states: Sequence[State], templates: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of all tasks together, by name. Raises ``LimpetError`` if a metric is not
    a number, or has no samples."""
    metrics: dict[str, float] = {}
    for name in _names(state["pairs"] for state in states):
        found = [state["pairs"][name] for state in states if name in state["pairs"]]
        total, count = _exact_sum(s for s, _ in found), _exact_sum(c for _, c in found)
        if count == 0:
            raise LimpetError(
                f"The metric {name} has no samples: the counts of all batches add up to 0"
            )
        metrics[name] = total / count
    for name in _names(state["states"] for state in states):
        found = [state["states"][name] for state in states if name in state["states"]]
        metric = deepcopy(templates[name])
        decoded = [{key: _decode(value) for key, value in each.items()} for each in found]
        for key, value in merge(metric, decoded).items():
            setattr(metric, key, value)
        metric._update_count, metric._computed = len(found), None
        metrics[name] = _to_float(metric.compute(), name, f"{type(metric).__name__}.compute()")
    return metrics


def merge(metric: Any, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge states as torchmetrics merges those of ranks: with the reductions of the metric."""
    import torch

    merged: dict[str, Any] = {}
    for key, reduction in metric._reductions.items():
        values = [state[key] for state in states]
        if isinstance(metric._defaults[key], list):
            merged[key] = [t for v in values for t in (v if isinstance(v, list) else [v])]
        else:
            stacked = torch.stack(values)
            merged[key] = stacked if reduction is None else reduction(stacked)
    return merged


def _names(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({name for part in parts for name in part})


def _exact_sum(values: Iterable[float]) -> float:
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or an overflow in between
        return float(sum(values))


def _to_float(value: Any, name: str, where: str) -> float:
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as e:
        raise LimpetError(
            f"{where} returned something other than a number for {name}: {to_repr(value)[:200]}"
        ) from e


def _detach(value: Any) -> Any:
    return [_detach(each) for each in value] if isinstance(value, list) else value.detach().cpu()


def _encode(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_encode(each) for each in value]
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": dtype_name(value.dtype),
        "shape": list(value.shape),
        "data": base64.b64encode(raw).decode(),
    }


def _decode(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_decode(each) for each in value]
    raw = bytearray(base64.b64decode(value["data"]))
    dtype = getattr(torch, value["dtype"])
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return (torch.frombuffer(raw, dtype=dtype) if raw else empty).reshape(value["shape"])


def _invalid(where: str, found: str) -> LimpetError:
    return LimpetError(f"{where} did not return metrics", expected=_EXPECTED, found=found)
