"""When to save and what to keep: frozen, pure, combined with ``|``.

A policy looks at records and answers; it never reads a clock, a store or a model itself, so a
table tests it. (The shape is Orbax's ``save_decision_policy`` and ``preservation_policy``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import HoldfastError
from holdfast.format.names import Version


@dataclass(frozen=True, slots=True)
class Moment:
    """What a save policy may look at. Seconds are of a monotonic clock."""

    step: int
    seconds: float
    last_step: int
    last_seconds: float


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When a save is due. ``a | b`` is due when either is."""

    def due(self, now: Moment) -> bool:
        """Whether the state after step ``now.step`` is to be saved. ``last_*`` are of the last
        save, or of the start of training where nothing has been saved since."""
        return False

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return _EitherDue(self, other)


@dataclass(frozen=True, slots=True)
class _EitherDue(SavePolicy):
    first: SavePolicy
    second: SavePolicy

    def due(self, now: Moment) -> bool:
        return self.first.due(now) or self.second.due(now)


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Save at every multiple of ``steps``, whatever was saved in between."""

    steps: int

    def __post_init__(self) -> None:
        _demand("EverySteps", self.steps >= 1, "1 step or more", self.steps)

    def due(self, now: Moment) -> bool:
        return now.step // self.steps > now.last_step // self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """Save at the first step that ends ``seconds`` or more after the last save."""

    seconds: float

    def __post_init__(self) -> None:
        _demand("EverySeconds", self.seconds > 0, "more than 0 seconds", self.seconds)

    def due(self, now: Moment) -> bool:
        return now.seconds - now.last_seconds >= self.seconds


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Which versions to keep. ``a | b`` keeps what either keeps."""

    def keep(self, versions: Sequence[Version]) -> frozenset[Version]:
        """Of committed versions on the line that training is on, oldest first, those to keep."""
        return frozenset(versions)

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        return _EitherKeeps(self, other)


@dataclass(frozen=True, slots=True)
class _EitherKeeps(KeepPolicy):
    first: KeepPolicy
    second: KeepPolicy

    def keep(self, versions: Sequence[Version]) -> frozenset[Version]:
        return self.first.keep(versions) | self.second.keep(versions)


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """Keep the newest ``count`` versions."""

    count: int

    def __post_init__(self) -> None:
        _demand("KeepLast", self.count >= 1, "1 version or more", self.count)

    def keep(self, versions: Sequence[Version]) -> frozenset[Version]:
        return frozenset(versions[-self.count :])


def _demand(name: str, good: bool, expected: str, found: object) -> None:
    if not good:
        raise HoldfastError(f"{name} can never fire so", expected=expected, found=found)
