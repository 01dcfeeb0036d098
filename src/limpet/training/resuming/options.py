"""The options of optimizers that the script has changed, and that a resume replaces nevertheless.

A difference between the live options and those of a version says nothing: a training changes its
learning rate. Versions therefore record the options that the script has passed to its optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple
from weakref import ref

from limpet.errors import ReplacedOptions
from limpet.lazy_torch import torch_or_none
from limpet.run.catalog import read_training_metadata
from limpet.snapshot.reader import SnapshotReader
from limpet.text import format_list, to_repr, warn_user
from limpet.training.resuming.members import find_members

RECORD = "options"
"""The field of the training metadata of a version."""

_MAX_NAMES = 5
_MAX_GROUPS = 64
"""The groups of the optimizers whose options are recorded, and the options of a group."""

_MAX_LENGTH = 80
"""The length of a text, and of a value in a message."""

_SCHEDULED = {"lr": "initial_lr", "momentum": "max_momentum", "betas": "max_momentum"}
"""Options that a scheduler sets if the group has the other one."""

Group = dict[str, Any]
Place = tuple[str, int, str]
Options = dict[Place, Any]
"""Options by the key of their optimizer in the state, the number of the group, and the name."""


class _Seen(NamedTuple):
    optimizer: ref[Any]
    run: str
    groups: list[Group]


_seen: dict[int, _Seen] = {}
"""The options of each optimizer, by its id, before its first resume from its run in this process.
An optimizer may have no hash. When it ends, the callback of the reference removes its entry."""


class OptionCheck:
    """Compares the options of the script with those that the versions record, on rank 0."""

    def __init__(self, run: str, state: dict[str, Any], rank: int) -> None:
        self._run, self._state, self._is_reporting = run, state, rank == 0
        self._own: Options = {}
        self._record: dict[str, list[Group]] = {}
        self._replaced: Options = {}  # the values of the earlier script
        self._loaded: Options = {}

    def begin(self) -> None:
        """Note the options of the script, before a resume."""
        if self._is_reporting:
            self._own, self._replaced = _read(self._state, self._run), {}
            self._record = _to_record(self._own)

    def check(self, snapshot: SnapshotReader, from_own_run: bool) -> None:
        """Warn of the options that the script has changed, and that this version has replaced."""
        if not self._own:
            return
        earlier = _from_record(read_training_metadata(snapshot).get(RECORD))
        own, now = self._own, _read(self._state)
        self._loaded = now
        self._replaced = {
            place: earlier[place]
            for place, value in own.items()
            if place in earlier
            and place in now
            and value not in (earlier[place], now[place])
            and not _is_scheduled(place, own, now)
            # the scheduler of a start may have been left out, and takes its own rate
            and (from_own_run or place[2] != "initial_lr")
        }
        if not self._replaced:
            return
        changed = [
            f"{_name(place, own)} is {_show(now[place])}, not {_show(own[place])}"
            for place in sorted(self._replaced)
        ]
        warn_user(
            "A resume restores the options of optimizers, and some that the script now passes are"
            f" not those with which the training to {snapshot.url} began:"
            f" {format_list(changed, _MAX_NAMES)}. The training continues with the options of the"
            " version. To use those of the script, set them in optimizer.param_groups after"
            ' resume() (docs/resume.md, "Changing the learning rate")',
            ReplacedOptions,
        )

    def to_metadata(self) -> Mapping[str, Any]:
        """Return what a version records: the options of the script, or those of an earlier script
        that nothing has changed between the resume and the first save after it."""
        if self._replaced:
            now = _read(self._state)
            places = {place: _watched(place) for place in self._replaced}
            kept = {p for p, w in places.items() if now.get(w) == self._loaded.get(w)}
            self._record = _to_record(self._own | {p: self._replaced[p] for p in kept})
            self._replaced = {}
        return {RECORD: self._record} if self._record else {}


def _watched(place: Place) -> Place:
    """Return the option that changes if the script sets this one, or a scheduler uses it."""
    key, number, name = place
    return key, number, "lr" if name == "initial_lr" else name


def _is_scheduled(place: Place, own: Options, now: Options) -> bool:
    key, number, name = place
    other = key, number, _SCHEDULED.get(name, "")
    return other in own or other in now


def _name(place: Place, options: Options) -> str:
    """Return ``optimizer/lr``, or ``optimizer/1/lr`` if the optimizer has several groups."""
    key, number, name = place
    has_several = any(k == key and n > 0 for k, n, _ in options)
    return f"{key}/{number}/{name}" if has_several else f"{key}/{name}"


def _read(state: dict[str, Any], run: str | None = None) -> Options:
    """Return the live options. ``run``: those before the first resume from this run instead."""
    torch: Any = torch_or_none()
    found: Options = {}
    left = _MAX_GROUPS
    for key, optimizer in find_members(state, torch.optim.Optimizer) if torch is not None else ():
        groups = [*map(_plain_options, islice(getattr(optimizer, "param_groups", ()), left))]
        left -= len(groups)
        if run is not None:
            groups = _before_first_resume(optimizer, run, groups)
        for number, group in enumerate(groups):
            found.update({(key, number, name): value for name, value in group.items()})
    return found


def _before_first_resume(optimizer: Any, run: str, groups: list[Group]) -> list[Group]:
    number = id(optimizer)
    seen = _seen.get(number)
    if seen is None or seen.run != run:
        seen = _Seen(ref(optimizer, lambda _: _seen.pop(number, None)), run, groups)
        _seen[number] = seen
    return seen.groups


def _to_record(options: Options) -> dict[str, list[Group]]:
    """Return what a version stores: the groups of each optimizer, those after the first one without
    what they have in common with it."""
    record: dict[str, list[Group]] = {}
    for (key, number, name), value in options.items():
        groups = record.setdefault(key, [])
        groups.extend({} for _ in range(number + 1 - len(groups)))
        if number == 0 or options.get((key, 0, name), ...) != value:
            groups[number][name] = value
    return record


def _from_record(record: Any) -> Options:
    """Return the options of a record; none, if it is not valid, as that of an earlier release."""
    found: Options = {}
    for key, groups in record.items() if isinstance(record, dict) else ():
        if not (isinstance(groups, list) and all(isinstance(group, dict) for group in groups)):
            continue
        for number, group in enumerate(groups):
            found |= {(key, number, name): v for name, v in {**groups[0], **group}.items()}
    return found


def _plain_options(group: Any) -> Group:
    """Return the numbers, texts, and short tuples of numbers of a group, as JSON has them."""
    found: Group = {}
    for name, value in islice(group.items(), _MAX_GROUPS) if isinstance(group, dict) else ():
        values = value if isinstance(value, list | tuple) else [value]
        plain = [*map(_to_plain, values[:8])]
        if isinstance(name, str) and name != "params" and len(values) <= 8 and ... not in plain:
            found[name] = plain if values is value else plain[0]
    return found


def _to_plain(value: Any) -> Any:
    """Return a value as JSON has it, also that of a subclass such as ``numpy.float64``, or ``...``
    for another one."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) and len(value) <= _MAX_LENGTH:
        return str(value)
    return float(value) if isinstance(value, float) and isfinite(value) else ...


def _show(value: Any) -> str:
    return to_repr(value)[:_MAX_LENGTH]
