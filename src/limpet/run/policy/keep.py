"""What to keep."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from msgspec import Struct
from msgspec import field as struct_field

from limpet.format.names import Version
from limpet.run.policy.checks import (
    Mode,
    check_count,
    check_metric,
    check_seconds,
    check_steps,
    require,
)


class Record(Struct, frozen=True):
    """The input of a keep policy for one version.

    ``metrics`` holds the metrics of the save, overridden by those of later evaluations.
    ``trained_seconds``: the time spent on steps until the save, if the version records it.
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
        check_count("KeepLast", self.count, "versions", "KeepLast(3)")

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        return frozenset(r.version for r in records[-self.count :])


@dataclass(frozen=True, slots=True, repr=False)
class KeepEvery(KeepPolicy):
    """Keep the first version at or after each positive multiple of ``steps`` or of ``seconds``.

    The version of step 0 is always kept: 0 is a multiple, too. ``seconds`` are those of training
    that a version records as ``trained_seconds``, across restarts; versions that record none are
    kept. The choice does not depend on how often retention has run before.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        example = "KeepEvery(10_000) or KeepEvery(seconds=3600)"
        if self.seconds is None:
            check_count("KeepEvery", self.steps, "steps", example)
            return
        check_seconds("KeepEvery", self.seconds, example)
        only = "either steps or seconds, not both"
        require("KeepEvery", self.steps is None, only, f"steps={self.steps}", example)

    def __repr__(self) -> str:
        argument = f"steps={self.steps}" if self.seconds is None else f"seconds={self.seconds}"
        return f"KeepEvery({argument})"

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
        steps = check_steps("KeepSteps", self.steps, 0, "KeepSteps([100, 1000])")
        object.__setattr__(self, "steps", steps)

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        positions = (
            bisect_left(records, step, key=lambda r: r.version.step) for step in self.steps
        )
        return frozenset(records[p].version for p in positions if p < len(records))


@dataclass(frozen=True, slots=True, repr=False)
class KeepBest(KeepPolicy):
    """Keep the ``count`` versions with the best value of ``metric``.

    The best value is the smallest with ``mode="min"`` and the largest with ``mode="max"``. The
    default is "min", but for a metric like ``val_accuracy`` the mode must be given. Of versions
    with equal values, the newer one is better. A version with NaN is not kept.

    ``unscored``: also keep that many of the newest versions without the metric, which an evaluation
    may still add. Otherwise, another policy must keep them until then.
    """

    count: int
    metric: str
    mode: Mode = None  # type: ignore[assignment]  # never None in an object
    unscored: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        example = 'KeepBest(2, "val_loss", mode="min", unscored=2)'
        check_count("KeepBest", self.count, "versions", example)
        mode = check_metric("KeepBest", self.metric, self.mode, example)
        object.__setattr__(self, "mode", mode)
        valid = type(self.unscored) is int and self.unscored >= 0
        expected = "a whole number of unscored versions, 0 or more"
        require("KeepBest", valid, expected, self.unscored, example)

    def __repr__(self) -> str:
        rest = f", unscored={self.unscored}" if self.unscored else ""
        return f"KeepBest(count={self.count}, metric={self.metric!r}, mode={self.mode!r}{rest})"

    def keep(self, records: Sequence[Record]) -> frozenset[Version]:
        best = best_first(records, self.metric, self.mode)[: self.count]
        newest = (r.version for r in reversed(records) if self.metric not in r.metrics)
        return frozenset((*best, *islice(newest, self.unscored)))

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
