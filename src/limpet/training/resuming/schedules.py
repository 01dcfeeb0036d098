"""The arguments of schedulers that a resume replaces, such as the length of a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

from limpet.errors import ReplacedSchedule
from limpet.lazy_torch import torch_or_none
from limpet.state.walk import find_named_instances
from limpet.text import format_list, warn_user

_MAX_NAMES = 5
_POSITION = {"last_epoch", "optimizer", "verbose"}

Arguments = dict[str, Any]
"""Arguments of the schedulers of a state, by the path of the scheduler and the name."""


def read_arguments(state: dict[str, Any]) -> Arguments:
    """Return the arguments with which the schedulers of PyTorch in a state were created.

    These are the parameters of a class that its objects have as attributes. Those of other classes
    may change during the training.
    """
    torch: Any = torch_or_none()
    if torch is None:
        return {}
    kind = torch.optim.lr_scheduler.LRScheduler
    found: Arguments = {}
    for path, scheduler in _with_nested(find_named_instances(state, kind, separator="/"), kind):
        if type(scheduler).__module__.startswith("torch.optim."):
            for name in signature(type(scheduler)).parameters.keys() - _POSITION:
                for attribute in (name, f"_{name}"):
                    value = vars(scheduler).get(attribute)
                    if _is_plain(value):
                        found[f"{path}/{attribute}"] = value
    return found


def _with_nested(found: Iterator[tuple[str, Any]], kind: type) -> Iterator[tuple[str, Any]]:
    for path, scheduler in found:
        yield path, scheduler
        nested = enumerate(getattr(scheduler, "_schedulers", ()))
        parts = ((f"{path}/_schedulers/{i}", s) for i, s in nested if isinstance(s, kind))
        yield from _with_nested(parts, kind)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float | str)


def warn_replaced(own: Arguments, state: dict[str, Any], url: str) -> None:
    """Warn of the arguments that the load of ``url`` has changed. ``own``: those before."""
    now = read_arguments(state)
    names = [name for name in sorted(own) if name in now and now[name] != own[name]]
    changed = [f"{name} is {now[name]}, not {own[name]}" for name in names]
    if changed:
        warn_user(
            f"A resume restores the arguments of schedulers, and those of {url} differ from those"
            f" of the script: {format_list(changed, _MAX_NAMES)}. The schedule of the version"
            " continues, and may end before the training. To use that of the script, load the"
            " state_dict() that the scheduler had before resume(), and make its steps again"
            ' (docs/resume.md, "Training longer than planned")',
            ReplacedSchedule,
        )
