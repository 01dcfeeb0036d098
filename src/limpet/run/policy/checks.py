"""Checks of the arguments of policies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import inf
from typing import Any, Literal

from limpet.errors import LimpetError
from limpet.text import to_repr

Mode = Literal["min", "max"]
"""Whether smaller or larger values of a metric are better."""


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_count(name: str, value: object, unit: str, example: str) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(name, valid, f"a whole number of {unit}, 1 or more", value, example)


_LARGER_IS_BETTER = frozenset(
    {"acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "miou", "ndcg", "psnr"}
)
"""Last words of names of metrics."""


def check_metric(name: str, metric: object, mode: Mode | None, example: str) -> Mode:
    """Return the mode: "min" if it is None, unless the metric says that larger is better."""
    valid = isinstance(metric, str) and metric != ""
    require(name, valid, "the name of a metric", metric, example)
    if mode is None and re.split(r"[^a-z0-9]+", str(metric).lower())[-1] in _LARGER_IS_BETTER:
        raise LimpetError(
            f"{name} needs a mode for {metric!r}: the default is that smaller values are better",
            todo='Pass mode="max", or mode="min" if smaller values are meant',
        )
    mode = "min" if mode is None else mode
    require(name, mode in ("min", "max"), 'mode="min" or mode="max"', mode, example)
    return mode


def require(name: str, valid: bool, expected: str, found: object, example: str) -> None:
    if not valid:
        raise LimpetError(
            f"Invalid argument to {name}",
            expected=expected,
            found=to_repr(found)[:200],
            todo=f"For example, write {example}",
        )


def check_seconds(name: str, value: object, example: str) -> None:
    valid = is_number(value) and 0 < value < inf  # type: ignore[operator]
    require(name, valid, "a finite number of seconds above 0", value, example)


def check_steps(name: str, steps: Any, least: int, example: str) -> tuple[int, ...]:
    """Return the steps in ascending order, each once."""
    listed = list(steps) if isinstance(steps, Iterable) and not isinstance(steps, str) else []
    valid = bool(listed) and all(type(step) is int and step >= least for step in listed)
    require(name, valid, f"a list of steps, each an int of {least} or more", steps, example)
    return tuple(sorted({*listed}))
