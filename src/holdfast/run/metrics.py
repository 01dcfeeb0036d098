"""What a metric may be: one rule for what is given to ``step`` and what evaluations add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import PlanError
from holdfast.text import with_article

_INT64_LIMIT = 1 << 63


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metrics as a dict of their own, of copies, if all are numbers. What lies on a device is
    not read: that would hold training up at every step. Raises ``PlanError``."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise PlanError(
            "Metrics are numbers by name",
            expected='a dict such as {"loss": loss}',
            found=with_article(type(metrics).__name__),
        )
    for name, value in metrics.items():
        if not _is_name(name) or not _is_number(value):
            many = getattr(value, "shape", None)
            raise PlanError(
                f"The metric {name!r} is no number",
                expected="an int of 64 bits, a float, or a real tensor or array of one element",
                found=with_article(type(value).__name__) + (f" of {tuple(many)}" if many else ""),
                todo="Give its mean, or leave it out",
            )
    return {name: _copy_value(value) for name, value in metrics.items()}


def _copy_value(value: Any) -> Any:
    """The value as it is now, whatever becomes of a tensor that is used again."""
    if hasattr(value, "detach"):
        return value.detach().clone()
    return value.copy() if hasattr(value, "copy") else value


def _is_name(name: object) -> bool:
    try:
        return isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _is_number(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, float) or (
            type(value) is int and -_INT64_LIMIT <= value < _INT64_LIMIT
        )
    # a tensor of one element knows item() too, but to call it would wait for its device
    elements = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
    real = ("float", "bfloat", "int", "uint")
    there = not getattr(value, "is_meta", False)
    return there and elements == 1 and str(dtype).removeprefix("torch.").startswith(real)


def to_number(value: Any) -> int | float:
    """A metric that was checked, read: an int of 64 bits or a float. Waits for its device."""
    found = value.item() if hasattr(value, "item") else value
    whole = isinstance(found, int) and -_INT64_LIMIT <= found < _INT64_LIMIT
    return int(found) if whole else float(found)  # a large uint64, NumPy's long double


def to_numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Metrics that were checked, read."""
    return {name: to_number(value) for name, value in metrics.items()}


def select_numbers(metrics: Any) -> dict[str, float]:
    """The members of ``metrics`` that are numbers."""
    if not isinstance(metrics, dict):
        return {}
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(name, str) and isinstance(value, int | float) and type(value) is not bool
    }
