"""The options of optimizers that the script has changed, and that a resume replaces nevertheless.

A difference between the live options and those of a version says nothing: a training changes its
learning rate. Versions therefore record the options that the script has passed to its optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

from holdfast.engine.snapshot.reader import SnapshotReader
from holdfast.engine.state.walk import find_named_instances
from holdfast.errors import ReplacedOptions
from holdfast.lazy_torch import torch_or_none
from holdfast.run.catalog import read_training_metadata
from holdfast.text import format_list, warn_user

RECORD = "options"
"""The field of the training metadata of a version."""

_MAX_NAMES = 5
_MAX_GROUPS = 64
"""The groups of an optimizer whose options are recorded."""

_SCHEDULED = {"lr": "initial_lr", "momentum": "max_momentum", "betas": "max_momentum"}
"""Options that a scheduler sets if the group has the other one."""

Group = dict[str, Any]
Options = dict[str, list[Group]]
"""The options of the groups of each optimizer, by its path in the state."""

_of_script: WeakKeyDictionary[Any, list[Group]] = WeakKeyDictionary()
"""The options of each optimizer before its first resume in this process."""


class OptionCheck:
    """Compares the options of the script with those that the versions record, on rank 0."""

    def __init__(self, state: dict[str, Any], rank: int) -> None:
        self._state, self._is_reporting = state, rank == 0
        self._own: Options = {}
        self._recorded: Options = {}
        self._replaced = dict[str, Any]()  # by name, the values of the script

    def begin(self) -> None:
        """Note the options of the script, before a resume."""
        if self._is_reporting:
            self._own = _read(self._state, of_script=True)
            self._recorded = _compress(self._own)
            self._replaced = {}

    def check(self, snapshot: SnapshotReader) -> None:
        """Warn of the options that the script has changed, and that this version has replaced."""
        stored = read_training_metadata(snapshot).get(RECORD) if self._own else None
        if not _is_options(stored):  # the version of an earlier release
            return
        own, earlier = _by_name(self._own), _by_name(stored)
        now = _by_name(_read(self._state))
        self._replaced = {
            name: value
            for name, value in own.items()
            if name in earlier and name in now and value not in (earlier[name], now[name])
        }
        if not self._replaced:
            return
        self._recorded = {**self._recorded, **stored}
        changed = [f"{name} is {now[name]}, not {v}" for name, v in sorted(self._replaced.items())]
        warn_user(
            "A resume restores the options of optimizers, and the script has changed some since"
            f" {snapshot.url} was saved: {format_list(changed, _MAX_NAMES)}. The training continues"
            " with those of the version. To use those of the script, set them in"
            ' optimizer.param_groups after resume() (docs/resume.md, "Changing the learning rate")',
            ReplacedOptions,
        )

    def to_metadata(self) -> Mapping[str, Any]:
        """Return what a version records: the options of the script, or those of an earlier script
        while they are in use. This is decided at the first save after a resume."""
        if self._replaced:
            now = _by_name(_read(self._state))
            if all(now.get(name) == value for name, value in self._replaced.items()):
                self._recorded = _compress(self._own)  # the script has set them after resume()
            self._replaced = {}
        return {RECORD: self._recorded} if self._recorded else {}


def _read(state: dict[str, Any], of_script: bool = False) -> Options:
    torch: Any = torch_or_none()
    if torch is None:
        return {}
    found: Options = {}
    for path, optimizer in find_named_instances(state, torch.optim.Optimizer, separator="/"):
        groups = [_plain_options(group) for group in optimizer.param_groups[:_MAX_GROUPS]]
        found[path] = _of_script.setdefault(optimizer, groups) if of_script else groups
    return found


def _compress(options: Options) -> Options:
    """Leave out what each group has in common with the first one."""
    return {
        path: [
            {name: v for name, v in group.items() if i == 0 or groups[0].get(name, group) != v}
            for i, group in enumerate(groups)
        ]
        for path, groups in options.items()
    }


def _by_name(options: Options) -> dict[str, Any]:
    """Return the options by names such as ``optimizer/lr``; ``optimizer/1/lr`` if it has several
    groups."""
    return {
        f"{path}/{name}" if len(groups) == 1 else f"{path}/{i}/{name}": value
        for path, groups in options.items()
        for i, group in enumerate(groups)
        for name, value in {**groups[0], **group}.items()
    }


def _is_options(stored: Any) -> TypeGuard[Options]:
    """Return True if another process has recorded valid options."""
    return isinstance(stored, dict) and all(
        isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
        for groups in stored.values()
    )


def _plain_options(group: Group) -> Group:
    """Return the options that a script passes, as JSON has them, without those of schedulers."""
    values = {name: [*v] if isinstance(v, tuple) else v for name, v in group.items()}
    return {
        name: value
        for name, value in values.items()
        if name not in ("params", "param_names")
        and _SCHEDULED.get(name) not in group
        and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, int | str | None) or (isinstance(value, float) and isfinite(value))
