"""When to save, what to keep, when to stop: frozen, pure; saving and keeping combined with ``|``.

A policy looks at records and answers; it never reads a clock, a store or a model itself, so a
table tests it. (The shape is Orbax's ``save_decision_policy`` and ``preservation_policy``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any, Literal

from holdfast.errors import HoldfastError
from holdfast.format.names import Version

Mode = Literal["min", "max"]


# -- when to save --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """What a save policy may look at: now, and what was at the last save (or at the start of the
    training where nothing has been saved since). Seconds are of a monotonic clock; epochs are
    those that are completed."""

    step: int
    seconds: float
    epochs: int
    last_step: int
    last_seconds: float
    last_epochs: int


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When a save is due. ``a | b`` is due when either is."""

    def due(self, now: PolicyInput) -> bool:
        """Whether the state after step ``now.step`` is to be saved."""
        return False

    @property
    def on_exception(self) -> bool:
        """Whether the state before a step that raised is to be saved."""
        return False

    @property
    def wants_epochs(self) -> bool:
        """Whether it can fire only where epochs are counted."""
        return False

    def __or__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return _SaveUnion(self, other)


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
    def wants_epochs(self) -> bool:
        return self.first.wants_epochs or self.second.wants_epochs


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Save at every multiple of ``steps``, whatever was saved in between."""

    steps: int

    def __post_init__(self) -> None:
        _check_count("EverySteps", self.steps, "steps", "EverySteps(500)")

    def due(self, now: PolicyInput) -> bool:
        return now.step // self.steps > now.last_step // self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """Save at the first step that ends ``seconds`` or more after the last save."""

    seconds: float

    def __post_init__(self) -> None:
        good = _is_number(self.seconds) and 0 < self.seconds < inf
        _require("EverySeconds", good, "seconds above 0", self.seconds, "EverySeconds(600)")

    def due(self, now: PolicyInput) -> bool:
        return now.seconds - now.last_seconds >= self.seconds


@dataclass(frozen=True, slots=True)
class EveryEpoch(SavePolicy):
    """Save at the step that completes an epoch, of every ``epochs`` epochs once."""

    epochs: int = 1

    def __post_init__(self) -> None:
        _check_count("EveryEpoch", self.epochs, "epochs", "EveryEpoch()")

    def due(self, now: PolicyInput) -> bool:
        return now.epochs // self.epochs > now.last_epochs // self.epochs

    @property
    def wants_epochs(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class OnException(SavePolicy):
    """Save when the training ends with an exception: the state before the step that raised."""

    @property
    def on_exception(self) -> bool:
        return True


# -- what to keep --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """What a keep policy sees of a version: its metrics are those of the save, overridden by
    those of later evaluations."""

    version: Version
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Which versions to keep. ``a | b`` keeps what either keeps."""

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        """Of committed, intact versions on the line that training is on, oldest first, those to
        keep."""
        return frozenset(r.version for r in records)

    @property
    def metrics(self) -> frozenset[str]:
        """Names of the metrics that it chooses by."""
        return frozenset()

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        if not isinstance(other, KeepPolicy):
            return NotImplemented
        return _KeepUnion(self, other)


@dataclass(frozen=True, slots=True)
class _KeepUnion(KeepPolicy):
    first: KeepPolicy
    second: KeepPolicy

    def __repr__(self) -> str:
        return f"{self.first} | {self.second}"

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        return self.first.keep(records) | self.second.keep(records)

    @property
    def metrics(self) -> frozenset[str]:
        return self.first.metrics | self.second.metrics


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """Keep the newest ``count`` versions."""

    count: int

    def __post_init__(self) -> None:
        _check_count("KeepLast", self.count, "versions", "KeepLast(3)")

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        return frozenset(r.version for r in records[-self.count :])


@dataclass(frozen=True, slots=True)
class KeepEvery(KeepPolicy):
    """Keep the first version at or after each multiple of ``steps``, from the first multiple on.

    It is the same version however often retention has run before.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery", self.steps, "steps", "KeepEvery(10_000)")

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        first: dict[int, Version] = {}
        for record in records:
            first.setdefault(record.version.step // self.steps, record.version)
        first.pop(0, None)
        return frozenset(first.values())


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keep the ``count`` versions with the smallest (``mode="max"``: largest) ``metric``.

    A version that has no such metric, or NaN, is not among them; of equal ones the newer is the
    better. A version that is evaluated later must be kept by another policy until then.
    """

    count: int
    metric: str
    mode: Mode = "min"

    def __post_init__(self) -> None:
        example = 'KeepBest(2, "val_loss", mode="min")'
        _check_count("KeepBest", self.count, "versions", example)
        _check_metric("KeepBest", self.metric, self.mode, example)

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        return frozenset(best_first(records, self.metric, self.mode)[: self.count])

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset((self.metric,))


def best_first(records: Sequence[Record], metric: str, mode: Mode = "min") -> list[Version]:
    """The versions that have the metric, from the best to the worst; of equal ones the newer
    first. NaN is left out."""
    found = [
        (r.metrics[metric], r.version)
        for r in reversed(records)
        if metric in r.metrics and not _is_nan(r.metrics[metric])
    ]
    # sort is stable, also in reverse: equal ones stay newest first
    found.sort(key=lambda pair: pair[0], reverse=mode == "max")
    return [version for _, version in found]


# -- when to stop --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopState:
    """How far a ``StopWhen`` is: the best value so far, and the values since that were no better
    (``misses``). It lies in the snapshot, so that a restart does not begin to wait anew."""

    best: float | None = None
    misses: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class StopWhen:
    """Stop when ``metric`` has not become better ``patience`` times in a row.

    Better: by more than ``min_delta`` below (``mode="max"``: above) the best so far. NaN is never
    better. (Keras' ``EarlyStopping``, but for NaN.)
    """

    metric: str
    patience: int = 3
    mode: Mode = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        example = 'StopWhen("val_loss", patience=3, mode="min")'
        _check_metric("StopWhen", self.metric, self.mode, example)
        _check_count("StopWhen", self.patience, "values as patience", example)
        good = _is_number(self.min_delta) and 0 <= self.min_delta < inf
        _require("StopWhen", good, "a min_delta of 0 or more", self.min_delta, example)

    def observe(self, state: StopState, value: float) -> StopState:
        """The state after one more value of the metric."""
        if _is_nan(value):
            better = False
        elif state.best is None:
            better = True
        elif self.mode == "min":
            better = value < state.best - self.min_delta
        else:
            better = value > state.best + self.min_delta
        if better:
            return StopState(value, 0, False)
        misses = state.misses + 1
        return StopState(state.best, misses, misses >= self.patience)

    def to_plain(self, state: StopState) -> dict[str, Any]:
        """``state`` as plain values, with what it is the state of."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "best": state.best,
            "misses": state.misses,
        }

    def from_plain(self, plain: object) -> StopState:
        """What ``to_plain`` made, seen with this patience. Anything else, the state of another
        metric or mode included, is a fresh start."""
        if not isinstance(plain, dict):
            return StopState()
        best, misses = plain.get("best"), plain.get("misses")
        same = (plain.get("metric"), plain.get("mode")) == (self.metric, self.mode)
        if not same or not isinstance(misses, int) or not (best is None or _is_number(best)):
            return StopState()
        return StopState(best, misses, misses >= self.patience)


def check_can_fire(policy: SavePolicy, epochs_known: bool) -> None:
    """Raise ``HoldfastError`` for a policy that can never fire in this training. ``epochs_end``:
    whether it is known at a step that it completes an epoch."""
    if policy.wants_epochs and not epochs_known:
        raise HoldfastError(
            "EveryEpoch can never fire: nothing in the state tells which step completes an epoch",
            expected="a holdfast.ElasticSampler in the state",
            found="none",
            todo="Put the sampler of the loader into the state; with another loader call"
            " ckpt.save() when an epoch is over",
        )


# -- what can never fire is refused --------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_nan(value: float) -> bool:
    return isinstance(value, float) and isnan(value)


def _check_count(name: str, value: object, unit: str, example: str) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _require(name, good, f"1 or more {unit}, a whole number", value, example)


def _check_metric(name: str, metric: object, mode: object, example: str) -> None:
    named = isinstance(metric, str) and metric != ""
    _require(name, named, "the name of a metric", metric, example)
    _require(name, mode in ("min", "max"), 'mode "min" or "max"', mode, example)


def _require(name: str, valid: bool, expected: str, found: object, example: str) -> None:
    if not valid:
        raise HoldfastError(
            f"{name} can never fire so",
            expected=expected,
            found=repr(found)[:200],
            todo=f"Write for example {example}",
        )
