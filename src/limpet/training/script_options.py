"""The options that the script has passed to its optimizers, and that a resume replaces.

A training changes its learning rate, so the live options of a version say nothing about the script.
Versions therefore record the options at the start of the process.
"""

from __future__ import annotations

from itertools import islice
from math import isfinite
from typing import Any

from limpet.lazy_torch import torch_or_none
from limpet.text import to_repr
from limpet.training.state_check import find_members

OPTIONS = "options"
"""The field of the training metadata of a version."""

_MAX_OPTIONS = 64
"""The groups of the optimizers whose options are recorded, and the options of a group."""

Options = dict[str, list[dict[str, Any]]]
"""The plain options of the groups of each optimizer, by its key in the state. A group after the
first one has only what differs from the first."""


def read_options(state: dict[str, Any]) -> Options:
    """Return the options of the optimizers in a state."""
    torch: Any = torch_or_none()
    found: Options = {}
    left = _MAX_OPTIONS
    for key, optimizer in find_members(state, torch.optim.Optimizer).items() if torch else ():
        param_groups = islice(getattr(optimizer, "param_groups", ()), left)
        groups = [_plain_options(group) for group in param_groups if isinstance(group, dict)]
        left -= len(groups)
        found[key] = groups[:1] + [
            {k: v for k, v in group.items() if groups[0].get(k, ...) != v} for group in groups[1:]
        ]
    return found


def describe_changes(script: Options, earlier: Any, used: Options) -> list[str]:
    """Describe the options that the script has changed since the version recorded ``earlier``, and
    that are nevertheless not ``used`` after the load."""
    try:
        before = _by_place(earlier or {})
    except (AttributeError, TypeError, LookupError):
        return []  # metadata that Limpet did not write
    own, now = _by_place(script), _by_place(used)
    return [
        f"{name if len(script) == 1 else f'{key}/{name}'}{f' of group {number}' * (number > 0)}:"
        f" the script has {to_repr(value)}, had {to_repr(before[place])}; the version's"
        f" {to_repr(now[place])} is in use"
        for place, value in own.items()
        if place in before and place in now and value not in (before[place], now[place])
        for key, number, name in [place]
    ]


def _by_place(options: Options) -> dict[tuple[str, int, str], Any]:
    return {
        (key, number, name): value
        for key, groups in options.items()
        for number, group in enumerate(groups)
        for name, value in {**groups[0], **group}.items()
    }


def _plain_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers, texts, and short tuples of numbers of a group, as JSON has them."""
    found: dict[str, Any] = {}
    for name, value in islice(group.items(), _MAX_OPTIONS):
        values = value if isinstance(value, list | tuple) else [value]
        plain = [_to_plain(v) for v in values[:8]]
        if name != "params" and len(values) <= 8 and ... not in plain:
            found[str(name)] = plain if values is value else plain[0]
    return found


def _to_plain(value: Any) -> Any:
    """Return a value as JSON has it, also that of a subclass such as ``numpy.float64``, or ``...``
    for another one."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) and len(value) <= 80:
        return str(value)
    return float(value) if isinstance(value, float) and isfinite(value) else ...
