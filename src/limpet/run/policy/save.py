"""When to save."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from limpet.errors import LimpetError
from limpet.run.policy.checks import check_count, check_seconds, check_steps


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

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return _SaveUnion(self, other) if isinstance(other, SavePolicy) else NotImplemented


@dataclass(frozen=True, slots=True)
class _SaveUnion(SavePolicy):
    first: SavePolicy
    second: SavePolicy

    def __post_init__(self) -> None:
        if isinstance(self.first, Never) or isinstance(self.second, Never):
            raise LimpetError(
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


@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Save at every multiple of ``steps``, regardless of other saves in between."""

    steps: int

    def __post_init__(self) -> None:
        check_count("EverySteps", self.steps, "steps", "EverySteps(500)")

    def due(self, now: PolicyInput) -> bool:
        return now.step // self.steps > now.last_step // self.steps


@dataclass(frozen=True, slots=True)
class AtSteps(SavePolicy):
    """Save at each of these ``steps``, or at the first step after it if it is passed over."""

    steps: Sequence[int]

    def __post_init__(self) -> None:
        steps = check_steps("AtSteps", self.steps, 1, "AtSteps([100, 1000])")
        object.__setattr__(self, "steps", steps)

    def due(self, now: PolicyInput) -> bool:
        return bisect_right(self.steps, now.step) > bisect_right(self.steps, now.last_step)


@dataclass(frozen=True, slots=True)
class EverySeconds(SavePolicy):
    """Save at the first step that ends at least ``seconds`` seconds after the last save."""

    seconds: float

    def __post_init__(self) -> None:
        check_seconds("EverySeconds", self.seconds, "EverySeconds(600)")

    def due(self, now: PolicyInput) -> bool:
        return now.seconds - now.last_seconds >= self.seconds


@dataclass(frozen=True, slots=True)
class EveryEpoch(SavePolicy):
    """Save when an epoch ends, once every ``epochs`` epochs: in a loop over
    ``Checkpointer.epochs``, or at ``Checkpointer.end_epoch``."""

    epochs: int = 1

    def __post_init__(self) -> None:
        check_count("EveryEpoch", self.epochs, "epochs", "EveryEpoch()")

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
