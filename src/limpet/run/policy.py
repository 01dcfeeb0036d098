"""Policies: when to save, what to keep, and when to stop. They are frozen, and combine with ``|``.

A policy decides from its arguments alone: it never reads a clock, a store, or a model. Multiples
count, so what is kept depends neither on how often retention ran nor on a lost version. (After
Orbax's ``save_decision_policy`` and ``preservation_policy``.)
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf, isnan
from typing import Any, Literal

from msgspec import Struct
from msgspec import field as struct_field

from limpet.arguments import check_count, check_seconds, real, require, whole
from limpet.errors import LimpetError
from limpet.format.names import Version

Mode = Literal["min", "max"]
"""Whether smaller or larger values of a metric are better."""


_LARGER_IS_BETTER = frozenset(
    {"acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "miou", "ndcg", "psnr"}
)
"""Last words of names of metrics."""


def check_metric(name: str, metric: object, mode: Mode | None) -> Mode:
    """Return the mode: "min" if it is None, unless the metric says that larger is better."""
    valid = isinstance(metric, str) and metric != ""
    require(f"The metric of {name}", valid, "the name of a metric", metric)
    if mode is None and re.split(r"[^a-z0-9]+", str(metric).lower())[-1] in _LARGER_IS_BETTER:
        raise LimpetError(
            f"{name} needs a mode for {metric!r}: the default is that smaller values are better",
            todo='Pass mode="max", or mode="min" if smaller values are meant',
        )
    mode = "min" if mode is None else mode
    require(f"The mode of {name}", mode in ("min", "max"), '"min" or "max"', mode)
    return mode


def check_steps(name: str, steps: Any, least: int) -> tuple[int, ...]:
    """Return the steps in ascending order, each once."""
    listed = list(steps) if isinstance(steps, Iterable) and not isinstance(steps, str) else []
    numbers = [number for step in listed if (number := whole(step, least)) is not None]
    valid = bool(listed) and len(numbers) == len(listed)
    expected = f"a list of steps, each a whole number, {least} or more"
    require(f"The argument of {name}", valid, expected, steps)
    return tuple(sorted({*numbers}))


# -- when to save ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """The input of a save policy: the current counts, and those at the last save or the start.
    Seconds are those of a monotonic clock. Epochs are completed epochs. ``is_saving``: a save is in
    flight, for which the next one would wait."""

    step: int
    seconds: float
    epochs: int
    last_step: int
    last_seconds: float
    last_epochs: int
    is_saving: bool = False


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Base class of the policies that decide when to save.

    ``a | b`` saves when ``a`` or ``b`` does. Every policy but ``Never`` and ``OnPreemption`` also
    saves the last step when training ends normally, unless the Checkpointer has ``at_end=False``.
    Every policy but ``Never`` saves before a preemption.
    """

    def due(self, now: PolicyInput) -> bool:
        """Return True if the state after step ``now.step`` must be saved."""
        return False

    @property
    def on_exception(self) -> bool:
        """True if an exception in a step saves the state before that step."""
        return False

    @property
    def at_end(self) -> bool:
        """True if the last step is saved when training ends normally."""
        return True

    def __or__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        if isinstance(self, Never) or isinstance(other, Never):
            union = f"{self} | {other}"
            raise LimpetError(f"Never() cannot be combined with another save policy: {union}")
        if isinstance(other, OnPreemption):  # all policies save then
            return self
        return other if isinstance(self, OnPreemption) else _SaveUnion(self, other)


@dataclass(frozen=True, slots=True)
class _SaveUnion(SavePolicy):
    first: SavePolicy
    second: SavePolicy

    def __repr__(self) -> str:
        return f"{self.first} | {self.second}"

    def due(self, now: PolicyInput) -> bool:
        return self.first.due(now) or self.second.due(now)

    @property
    def on_exception(self) -> bool:
        return self.first.on_exception or self.second.on_exception

    @property
    def at_end(self) -> bool:
        return self.first.at_end or self.second.at_end


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Save at every multiple of ``steps``, regardless of other saves in between."""

    steps: int

    def __post_init__(self) -> None:
        steps = check_count("The argument of EverySteps", self.steps, unit="steps")
        object.__setattr__(self, "steps", steps)

    def due(self, now: PolicyInput) -> bool:
        return now.step // self.steps > now.last_step // self.steps


@dataclass(frozen=True, slots=True)
class AtSteps(SavePolicy):
    """Save at each of these ``steps``, or at the first step after it if it is passed over."""

    steps: Sequence[int]

    def __post_init__(self) -> None:
        steps = check_steps("AtSteps", self.steps, 1)
        object.__setattr__(self, "steps", steps)

    def due(self, now: PolicyInput) -> bool:
        return bisect_right(self.steps, now.step) > bisect_right(self.steps, now.last_step)


@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """Save at the first step that ends at least ``seconds`` seconds after the last save."""

    seconds: float

    def __post_init__(self) -> None:
        seconds = check_seconds("The argument of EverySeconds", self.seconds)
        object.__setattr__(self, "seconds", seconds)

    def due(self, now: PolicyInput) -> bool:
        return now.seconds - now.last_seconds >= self.seconds


@dataclass(frozen=True, slots=True)
class Continuously(SavePolicy):
    """Save at the first step after the last save has ended, and at least ``at_least`` seconds after
    it began. 0: as often as possible. No step waits for a save because of this policy. (After
    Orbax's ``ContinuousCheckpointingPolicy``.)"""

    at_least: float

    def __post_init__(self) -> None:
        seconds = check_seconds("at_least= of Continuously", self.at_least, may_be_zero=True)
        object.__setattr__(self, "at_least", seconds)

    def due(self, now: PolicyInput) -> bool:
        return not now.is_saving and now.seconds - now.last_seconds >= self.at_least


@dataclass(frozen=True, slots=True)
class EveryEpoch(SavePolicy):
    """Save when an epoch ends, once every ``epochs`` epochs: in a loop over
    ``Checkpointer.epochs``, or at ``Checkpointer.end_epoch``."""

    epochs: int = 1

    def __post_init__(self) -> None:
        epochs = check_count("The argument of EveryEpoch", self.epochs, unit="epochs")
        object.__setattr__(self, "epochs", epochs)

    def due(self, now: PolicyInput) -> bool:
        return now.epochs // self.epochs > now.last_epochs // self.epochs


@dataclass(frozen=True, slots=True)
class OnException(SavePolicy):
    """Save the state before the step that raised, when an exception ends the training."""

    on_exception = True


@dataclass(frozen=True, slots=True)
class AtEnd(SavePolicy):
    """Save only the last step, when training ends normally: in ``close``, or at the end of the
    block. All policies but ``Never`` and ``OnPreemption`` include this."""


@dataclass(frozen=True, slots=True)
class OnPreemption(SavePolicy):
    """Save only before a preemption, or on request: not at the end. All policies but ``Never``
    include this."""

    at_end = False


@dataclass(frozen=True, slots=True)
class Never(SavePolicy):
    """Save only on request: not on a schedule, at the end, before a preemption, or after an
    exception. It cannot be combined with other policies, which would save."""

    at_end = False


def contains_at_end(policy: SavePolicy) -> bool:
    """Return True if a policy is ``AtEnd()``, or a union with it."""
    if isinstance(policy, _SaveUnion):
        return contains_at_end(policy.first) or contains_at_end(policy.second)
    return isinstance(policy, AtEnd)


# -- what to keep ------------------------------------------------------------------------------


class Record(Struct, frozen=True):
    """The input of a keep policy for one version.

    ``metrics``: those of the save, and those of later evaluations, which override them.
    ``trained_seconds``: the time spent on steps until the save, if it is recorded.
    """

    version: Version
    metrics: Mapping[str, float] = struct_field(default_factory=dict)
    trained_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Base class of the policies that decide which versions to keep.

    ``a | b`` keeps every version that ``a`` or ``b`` keeps. The base class keeps all versions.
    """

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        """Return which ``records`` to keep, of the intact ones on the lineage, oldest first."""
        return frozenset(r.version for r in records)

    @property
    def objectives(self) -> frozenset[tuple[str, Mode]]:
        """The metrics whose best versions the policy keeps, each with its mode."""
        return frozenset()

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        return KeepUnion(self, other) if isinstance(other, KeepPolicy) else NotImplemented


@dataclass(frozen=True, slots=True)
class KeepUnion(KeepPolicy):
    first: KeepPolicy
    second: KeepPolicy

    def __repr__(self) -> str:
        return f"{self.first} | {self.second}"

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        return self.first.keep(records) | self.second.keep(records)

    @property
    def objectives(self) -> frozenset[tuple[str, Mode]]:
        return self.first.objectives | self.second.objectives


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """Keep the newest ``count`` versions."""

    count: int

    def __post_init__(self) -> None:
        count = check_count("The argument of KeepLast", self.count, unit="versions")
        object.__setattr__(self, "count", count)

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        return frozenset(r.version for r in records[-self.count :])


@dataclass(frozen=True, slots=True)
class KeepEvery(KeepPolicy):
    """Keep the first version at or after each positive multiple of ``steps`` or of ``seconds``.

    The version of step 0 is always kept: 0 is a multiple, too. ``seconds`` are those of training
    that a version records as ``trained_seconds``, across restarts; versions that record none are
    kept. The choice does not depend on how often retention has run before.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is None:
            steps = check_count("The argument of KeepEvery", self.steps, unit="steps")
            object.__setattr__(self, "steps", steps)
            return
        seconds = check_seconds("seconds= of KeepEvery", self.seconds)
        object.__setattr__(self, "seconds", seconds)
        require("steps= of KeepEvery", self.steps is None, "None with seconds=", self.steps)

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        first: dict[float, Version] = {}
        always = [r.version for r in records if r.version.step == 0]
        for record in records:
            position = self._position(record)
            if position is None:
                always.append(record.version)
            else:
                first.setdefault(position, record.version)
        first.pop(0, None)
        return frozenset((*first.values(), *always))

    def _position(self, record: Record) -> float | None:
        """Return the number of multiples until a version, or None if that is unknown."""
        if self.steps is not None:
            return record.version.step // self.steps
        seconds = record.trained_seconds
        return None if seconds is None or self.seconds is None else seconds // self.seconds


@dataclass(frozen=True, slots=True)
class KeepSteps(KeepPolicy):
    """Keep the version of each of these ``steps``, or the first one after it if there is none."""

    steps: Sequence[int]

    def __post_init__(self) -> None:
        steps = check_steps("KeepSteps", self.steps, 0)
        object.__setattr__(self, "steps", steps)

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        positions = (
            bisect_left(records, step, key=lambda r: r.version.step) for step in self.steps
        )
        return frozenset(records[p].version for p in positions if p < len(records))


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keep the ``count`` versions with the best value of ``metric``.

    The best value is the smallest with ``mode="min"`` and the largest with ``mode="max"``. The
    default is "min", but for a metric like ``val_accuracy`` the mode must be given. Of versions
    with equal values, the newer one is better. A version with NaN is not kept.

    While no version has a number as this metric, all are kept. From then on, ``unscored`` of the
    newest versions without the metric are also kept, because an evaluation may still add it.
    """

    count: int
    metric: str
    mode: Mode = None  # type: ignore[assignment]  # never None in an object
    unscored: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        count = check_count("count= of KeepBest", self.count, unit="versions")
        object.__setattr__(self, "count", count)
        mode = check_metric("KeepBest", self.metric, self.mode)
        object.__setattr__(self, "mode", mode)
        unscored = check_count("unscored= of KeepBest", self.unscored, 0, "versions")
        object.__setattr__(self, "unscored", unscored)

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        best = best_first(records, self.metric, self.mode)[: self.count]
        if not best:
            return KeepPolicy.keep(self, records)  # the name of the metric may be misspelled
        newest = (r.version for r in reversed(records) if self.metric not in r.metrics)
        return frozenset((*best, *islice(newest, self.unscored)))

    @property
    def objectives(self) -> frozenset[tuple[str, Mode]]:
        return frozenset(((self.metric, self.mode),))


def best_first(records: Sequence[Record], metric: str, mode: Mode = "min") -> list[Version]:
    """Return the versions that have the metric, from the best to the worst, without those with NaN.
    Of equal values, the newest comes first."""
    values = [
        (r.metrics[metric], r.version)
        for r in reversed(records)
        if metric in r.metrics and r.metrics[metric] == r.metrics[metric]  # NaN differs from itself
    ]
    # sort is stable even with reverse=True, so equal values stay in order from the newest
    values.sort(key=lambda pair: pair[0], reverse=mode == "max")
    return [version for _, version in values]


# -- when to stop ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopState:
    """The progress of a ``StopWhen``: the best value, and the values since then that were not
    better. Each snapshot stores it, so that a restart does not reset the patience."""

    best: float | None = None
    misses: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class StopWhen:
    """Stop when ``patience`` values of ``metric`` in a row are not better than the best so far.

    The order is that of the steps. A value is better if it is below the best value (above it with
    ``mode="max"``) by more than ``min_delta``. NaN is never better. (Keras's ``EarlyStopping``,
    except for NaN.) For a metric like ``val_accuracy`` the mode must be given.
    """

    metric: str
    patience: int = 3
    mode: Mode = None  # type: ignore[assignment]  # never None in an object
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        mode = check_metric("StopWhen", self.metric, self.mode)
        object.__setattr__(self, "mode", mode)
        patience = check_count("patience= of StopWhen", self.patience, unit="values")
        object.__setattr__(self, "patience", patience)
        delta = real(self.min_delta)
        valid = delta is not None and 0 <= delta < inf
        require("min_delta= of StopWhen", valid, "a finite number, 0 or more", self.min_delta)
        object.__setattr__(self, "min_delta", delta)

    def observe(self, state: StopState, value: float) -> StopState:
        """Return the state after one more value of the metric."""
        if state.best is None:
            better = not isnan(value)
        elif self.mode == "min":  # NaN is never better: a comparison with NaN is False
            better = value < state.best - self.min_delta
        else:
            better = value > state.best + self.min_delta
        if better:
            return StopState(value)
        misses = state.misses + 1
        return StopState(state.best, misses, misses >= self.patience)
