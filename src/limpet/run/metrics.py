"""The rule for valid metrics, shared by ``Checkpointer.step`` and ``Run.add_metrics``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from limpet.errors import PlanError
from limpet.lazy_torch import torch_or_none
from limpet.text import is_text, to_repr, with_article

ADDED_METRICS = "metrics"
"""The default name of metrics that no evaluation job records, such as those of the training. No job
has this name: it would take a version with such metrics for one that it has evaluated."""

_INT64_LIMIT = 1 << 63


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the metrics. Values on a device are not read, which would block training.
    Raises ``PlanError`` unless ``metrics`` maps names to numbers."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise PlanError(
            'The metrics must be a dict such as {"loss": loss}, not '
            + with_article(type(metrics).__name__)
        )
    for name, value in metrics.items():
        if not is_text(name) or not _is_number(value):
            shape = getattr(value, "shape", None)
            raise PlanError(
                f"The metric {to_repr(name)[:80]} is not a number",
                expected="a 64-bit int, a float, or a real tensor or array of one element",
                found=with_article(type(value).__name__)
                + (f" of shape {tuple(shape)}" if shape else ""),
                todo="Pass its mean, or omit the metric",
            )
    return {name: _copy_value(value) for name, value in metrics.items()}


def _copy_value(value: Any) -> Any:
    """Copy a value, so that a later in-place change of a tensor does not affect it."""
    if hasattr(value, "detach"):
        return value.detach().clone()
    return value.copy() if hasattr(value, "copy") else value


def _is_number(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, float) or (
            type(value) is int and -_INT64_LIMIT <= value < _INT64_LIMIT
        )
    # item() would also reject more than one element, but it waits for the device
    element_count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
    is_real = str(dtype).removeprefix("torch.").startswith(("float", "bfloat", "int", "uint"))
    has_data = not getattr(value, "is_meta", False)
    return has_data and element_count == 1 and is_real


def to_number(value: Any) -> int | float:
    """Return a checked metric as a 64-bit int or a float. Waits for the metric's device."""
    number = value.item() if hasattr(value, "item") else value
    fits_int64 = isinstance(number, int) and -_INT64_LIMIT <= number < _INT64_LIMIT
    # float() also converts a uint64 above the int64 range and NumPy's long double
    return int(number) if fits_int64 else float(number)


def to_numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Return checked metrics as 64-bit ints and floats. Waits for their devices."""
    return {name: to_number(value) for name, value in metrics.items()}


Row = tuple[tuple[int, int], int, dict[str, Any]]
"""The branch and the step from which a training went on to a step; that step; and its metrics."""


def read_rows(rows: Sequence[Row], *, may_wait: bool) -> list[Row]:
    """Return rows of checked metrics with 64-bit ints and floats. Waits once for each device; or
    else omits rows with values on devices."""
    torch = torch_or_none()
    tensor = None if torch is None else torch.Tensor
    read = [
        ((branch, min(after, step)), step, dict(metrics))  # a program may go back by itself
        for (branch, after), step, metrics in rows
        if may_wait or not any(map(_is_on_device, metrics.values()))
    ]
    groups = defaultdict[Any, list[tuple[dict[str, Any], str]]](list)
    for _, _, metrics in read:
        for name, value in metrics.items():
            kind = type(value)
            if kind is tensor and value.is_floating_point() and value.element_size() > 1:
                groups[value.device, value.dtype, value.shape].append((metrics, name))
            elif kind is not float:
                metrics[name] = to_number(value)
    for group in groups.values():
        numbers = torch.stack([metrics[name] for metrics, name in group]).flatten().tolist()
        for (metrics, name), number in zip(group, numbers, strict=True):
            metrics[name] = number
    return read


def _is_on_device(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "cpu") != "cpu"
