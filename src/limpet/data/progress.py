"""The progress of a training loop: its epoch, step, and number of samples."""

from __future__ import annotations

from typing import Any

from limpet.errors import LimpetError, PlanError
from limpet.text import to_repr

_FIELDS = {"epoch", "step", "samples"}
_OPTIONAL_FIELDS = {"epoch_began"}
"""A field that the state lacks in the first epoch."""

_MAX_COUNT = 10**17


class Progress:
    """The progress of the training.

    ``step``: the number of steps completed, which ``Checkpointer.step`` counts. ``epoch``: the
    number of epochs before the current one, which ``Checkpointer.end_epoch`` counts, and
    ``Checkpointer.epochs`` by it. ``samples``: a number that the user counts.

    ``step`` and ``epoch`` may be set before the first step of a process. Later, that raises
    ``LimpetError``.
    """

    def __init__(self) -> None:
        self._step = self._epoch = self._epoch_began = self.samples = 0
        self._knows_began = False  # and it is not 0
        self._is_counted = False  # a step or an epoch was counted since the last load

    def __repr__(self) -> str:
        return f"Progress(epoch={self._epoch}, step={self._step}, samples={self.samples})"

    @property
    def step(self) -> int:
        """The number of steps completed."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._check_may_set("step", step, "ckpt.step()")
        self._step = step

    @property
    def epoch(self) -> int:
        """The number of epochs before the current one."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._check_may_set("epoch", epoch, "ckpt.epochs() or ckpt.end_epoch()")
        self._begin_epoch(epoch)

    @property
    def step_in_epoch(self) -> int:
        """The number of steps since ``epoch`` last changed.

        After a resume within a later epoch of a version that does not store when it began, those
        since the resume.
        """
        return self._step - self._epoch_began

    def state_dict(self) -> dict[str, int]:
        state = {"epoch": self._epoch, "step": self._step, "samples": self.samples}
        return state | ({"epoch_began": self._epoch_began} if self._knows_began else {})

    def check_state_dict(self, state: object) -> None:
        """Raise ``PlanError`` if this is not the state of a ``Progress``."""
        if not isinstance(state, dict) or set(state) - _OPTIONAL_FIELDS != _FIELDS:
            raise PlanError(
                "The loaded value is not the state of a Progress",
                expected="epoch, step, and samples",
                found=", ".join(map(str, state)) if isinstance(state, dict) else type(state),
            )
        if not all(_is_count(state[n]) for n in ("epoch", "step")):
            raise PlanError(
                "The state of a Progress contains a position that does not exist",
                expected="an int of 0 or more as epoch and as step",
                found=f"epoch={state['epoch']!r}, step={state['step']!r}"[:200],
            )

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load a state. Raises ``PlanError`` if it is not the state of a ``Progress``."""
        self.check_state_dict(state)
        self._epoch, self._step, self.samples = state["epoch"], state["step"], state["samples"]
        self._epoch_began = state.get("epoch_began", self._step if self._epoch else 0)
        self._knows_began = "epoch_began" in state
        self._is_counted = False

    # -- for the Checkpointer ----------------------------------------------------------------------

    def add_steps(self, steps: int) -> None:
        """Count more steps."""
        self._is_counted = True
        self._step += steps

    def end_epoch(self) -> None:
        """Count an epoch."""
        self._is_counted = True
        self._begin_epoch(self._epoch + 1)

    def resume(self, step: int | None) -> None:
        """Allow assignments until the next step. Continue at ``step``, unless it is None."""
        self._is_counted = False
        self._step = self._step if step is None else step

    def _begin_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._epoch_began, self._knows_began = epoch, self._step, True

    def _check_may_set(self, name: str, count: Any, counter: str) -> None:
        if not _is_count(count):
            raise LimpetError(f"progress.{name} must be an int of 0 or more, not {to_repr(count)}")
        if self._is_counted:
            raise LimpetError(f"progress.{name} cannot be set: {counter} counts the {name}s")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT
