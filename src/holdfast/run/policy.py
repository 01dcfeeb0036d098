"""Policies: when to save, what to keep, and when to stop.

Policies are frozen and pure. A policy decides from its arguments alone and never reads a clock, a
store, or a model. A table of inputs and results therefore tests it. Policies combine with ``|``.
(The design follows Orbax's ``save_decision_policy`` and ``preservation_policy``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, Literal

from msgspec import Struct, field

from holdfast.errors import HoldfastError
from holdfast.format.names import Version
from holdfast.text import to_repr

Mode = Literal["min", "max"]


# -- when to save --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """The input of a save policy: the current counts and those at the last save.

    If nothing has been saved yet, the ``last_`` values are those at the start of the training.
    Seconds are those of a monotonic clock. Epochs are completed epochs.
    """

    step: int
    seconds: float
    epochs: int
    last_step: int
    last_seconds: float
    last_epochs: int


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Base class of the policies that decide when to save.

    ``a | b`` saves when ``a`` or ``b`` does. The base class never saves.
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
        return False

    @property
    def wants_epochs(self) -> bool:
        """True if the policy can fire only when epochs are counted."""
        return False

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return _SaveUnion(self, other) if isinstance(other, SavePolicy) else NotImplemented


@dataclass(frozen=True, slots=True)
class _SaveUnion(SavePolicy):
    first: SavePolicy
    second: SavePolicy

    def __post_init__(self) -> None:
        if isinstance(self.first, Never) or isinstance(self.second, Never):
            raise HoldfastError(
                "Never() cannot be combined with another save policy",
                expected="Never(), which saves only on request, or policies that save",
                found=f"{self}",
                todo="Use Never() alone, or remove it",
            )

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

    @property
    def wants_epochs(self) -> bool:
        return self.first.wants_epochs or self.second.wants_epochs


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Save at every multiple of ``steps``, regardless of other saves in between."""

    steps: int

    def __post_init__(self) -> None:
        _check_count("EverySteps", self.steps, "steps", "EverySteps(500)")

    def due(self, now: PolicyInput) -> bool:
        return now.step // self.steps > now.last_step // self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """Save at the first step that ends at least ``seconds`` seconds after the last save."""

    seconds: float

    def __post_init__(self) -> None:
        valid = _is_number(self.seconds) and 0 < self.seconds < inf
        expected = "a finite number of seconds above 0"
        _require("EverySeconds", valid, expected, self.seconds, "EverySeconds(600)")

    def due(self, now: PolicyInput) -> bool:
        return now.seconds - now.last_seconds >= self.seconds


@dataclass(frozen=True, slots=True)
class EveryEpoch(SavePolicy):
    """Save at the step that completes an epoch, once every ``epochs`` epochs."""

    epochs: int = 1
    wants_epochs = True

    def __post_init__(self) -> None:
        _check_count("EveryEpoch", self.epochs, "epochs", "EveryEpoch()")

    def due(self, now: PolicyInput) -> bool:
        return now.epochs // self.epochs > now.last_epochs // self.epochs


@dataclass(frozen=True, slots=True)
class OnException(SavePolicy):
    """Save the state before the step that raised, when an exception ends the training."""

    on_exception = True


@dataclass(frozen=True, slots=True)
class AtEnd(SavePolicy):
    """Save the last step when training ends normally: in ``close``, or at the end of the block."""

    at_end = True


@dataclass(frozen=True, slots=True)
class Never(SavePolicy):
    """Save only on request: not on a schedule, at the end, or after an exception.

    It cannot be combined with other policies, which would save.
    """


# -- what to keep --------------------------------------------------------------------------------


class Record(Struct, frozen=True):
    """The input of a keep policy for one version.

    ``metrics`` holds the metrics of the save, overridden by those of later evaluations.
    """

    version: Version
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Base class of the policies that decide which versions to keep.

    ``a | b`` keeps every version that ``a`` or ``b`` keeps. The base class keeps all versions.
    """

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        """Return the versions to keep.

        ``records`` are the committed, intact versions on the current lineage, oldest first.
        """
        return frozenset(r.version for r in records)

    @property
    def metrics(self) -> frozenset[str]:
        """The names of the metrics that the policy uses."""
        return frozenset(metric for metric, _ in self.objectives)

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
    def metrics(self) -> frozenset[str]:
        return self.first.metrics | self.second.metrics

    @property
    def objectives(self) -> frozenset[tuple[str, Mode]]:
        return self.first.objectives | self.second.objectives


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
    """Keep the first version at or after each positive multiple of ``steps``.

    The choice does not depend on how often retention has run before.
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
    """Keep the ``count`` versions with the best value of ``metric``.

    The best value is the smallest with ``mode="min"`` and the largest with ``mode="max"``. Of
    versions with equal values, the newer one is better. This policy does not keep a version
    without the metric or with NaN. If versions are evaluated after they are saved, another policy
    must keep them until then.
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
    def objectives(self) -> frozenset[tuple[str, Mode]]:
        return frozenset(((self.metric, self.mode),))


def best_first(records: Sequence[Record], metric: str, mode: Mode = "min") -> list[Version]:
    """Return the versions that have the metric, from the best to the worst.

    Versions with equal values are in order from the newest to the oldest. Versions with NaN are
    omitted.
    """
    values = [
        (r.metrics[metric], r.version)
        for r in reversed(records)
        if metric in r.metrics and r.metrics[metric] == r.metrics[metric]  # NaN differs from itself
    ]
    # sort is stable even with reverse=True, so equal values stay in order from the newest
    values.sort(key=lambda pair: pair[0], reverse=mode == "max")
    return [version for _, version in values]


# -- when to stop --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopState:
    """The progress of a ``StopWhen``.

    ``best`` is the best value so far, and ``misses`` is the number of values since then that were
    not better. Each snapshot stores this state, so that a restart does not reset the patience.
    """

    best: float | None = None
    misses: int = 0
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class StopWhen:
    """Stop when ``patience`` values of ``metric`` in a row are not better than the best so far.

    The order is that of the steps. A value is better if it is below the best value (above it with
    ``mode="max"``) by more than ``min_delta``. NaN is never better. (Keras's ``EarlyStopping``,
    except for NaN.)
    """

    metric: str
    patience: int = 3
    mode: Mode = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        example = 'StopWhen("val_loss", patience=3, mode="min")'
        _check_metric("StopWhen", self.metric, self.mode, example)
        _check_count("StopWhen", self.patience, "values (patience)", example)
        valid = _is_number(self.min_delta) and 0 <= self.min_delta < inf
        _require("StopWhen", valid, "a finite min_delta of 0 or more", self.min_delta, example)

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

    def to_plain(self, state: StopState) -> dict[str, Any]:
        """Return ``state`` as plain values, together with the metric and the mode."""
        plain = {"metric": self.metric, "mode": self.mode}
        return {**plain, "best": state.best, "misses": state.misses}

    def from_plain(self, plain: object) -> StopState:
        """Return the state from the result of ``to_plain``, judged by this policy's patience.

        For any other value, or for another metric or mode, the result is a new state.
        """
        stored = plain if isinstance(plain, dict) else {}
        best, misses = stored.get("best"), stored.get("misses")
        matches = (stored.get("metric"), stored.get("mode")) == (self.metric, self.mode)
        if not matches or not isinstance(misses, int) or not (best is None or _is_number(best)):
            return StopState()
        return StopState(best, misses, misses >= self.patience)


# -- checks of arguments -------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_count(name: str, value: object, unit: str, example: str) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _require(name, valid, f"a whole number of {unit}, 1 or more", value, example)


def _check_metric(name: str, metric: object, mode: object, example: str) -> None:
    valid = isinstance(metric, str) and metric != ""
    _require(name, valid, "the name of a metric", metric, example)
    _require(name, mode in ("min", "max"), 'mode="min" or mode="max"', mode, example)


def _require(name: str, valid: bool, expected: str, found: object, example: str) -> None:
    if not valid:
        raise HoldfastError(
            f"Invalid argument to {name}",
            expected=expected,
            found=to_repr(found)[:200],
            todo=f"For example, write {example}",
        )
