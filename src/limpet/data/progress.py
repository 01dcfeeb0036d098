"""The progress of a training loop: its epoch, step, and number of samples."""

from __future__ import annotations

import sys
from opcode import opmap

from limpet.errors import PlanError

_FIELDS = {"epoch", "step", "samples"}
_OPTIONAL_FIELDS = {"epoch_began"}
"""Fields that a state lacks in the first epoch, and that earlier releases do not write."""


_COPY = opmap["COPY"]


class Progress:
    """The progress of the training.

    The ``Checkpointer`` increments ``step``, and ``Checkpointer.end_epoch`` increments ``epoch``.
    A loop that does not call ``end_epoch`` sets ``epoch`` itself. The user sets ``samples``.
    """

    def __init__(self) -> None:
        self._step = self._samples = 0
        self._epoch = self._epoch_began = 0
        self._knows_began = False  # and it is not 0
        self._reads = 0  # of the position by the loop: the package reads the attributes

    def _note_read(self) -> None:
        """Count a read by the loop, unless it belongs to ``progress.epoch += 1``: an increment
        copies the reference to the object before it loads the attribute."""
        frame = sys._getframe(2)
        before = frame.f_lasti - 2
        if before < 0 or frame.f_code.co_code[before] != _COPY:
            self._reads += 1

    def __repr__(self) -> str:
        return f"Progress(epoch={self._epoch}, step={self._step}, samples={self._samples})"

    @property
    def step(self) -> int:
        """The number of steps completed."""
        self._note_read()
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step

    @property
    def samples(self) -> int:
        """The number of samples, which the user counts."""
        self._note_read()
        return self._samples

    @samples.setter
    def samples(self, samples: int) -> None:
        self._samples = samples

    @property
    def epoch(self) -> int:
        """The number of epochs before the current one."""
        self._note_read()
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._epoch_began, self._knows_began = epoch, self._step, True

    @property
    def step_in_epoch(self) -> int:
        """The number of steps since ``epoch`` last changed.

        After a resume within a later epoch of a version of an earlier release, which does not store
        when it began, those since the resume.
        """
        self._note_read()
        return self._steps_in_epoch()

    def _steps_in_epoch(self) -> int:
        """Return ``step_in_epoch``, for the package, which does not tell the loop."""
        return self._step - self._epoch_began

    def state_dict(self) -> dict[str, int]:
        state = {"epoch": self._epoch, "step": self._step, "samples": self._samples}
        return state | ({"epoch_began": self._epoch_began} if self._knows_began else {})

    def check_state_dict(self, state: object) -> None:
        """Raise ``PlanError`` if this is not the state of a ``Progress``."""
        if not isinstance(state, dict) or set(state) - _OPTIONAL_FIELDS != _FIELDS:
            raise PlanError(
                "The loaded value is not the state of a Progress",
                expected="epoch, step, and samples",
                found=", ".join(map(str, state)) if isinstance(state, dict) else type(state),
            )

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load a state. Raises ``PlanError`` if it is not the state of a ``Progress``."""
        self.check_state_dict(state)
        self._epoch, self._step, self._samples = state["epoch"], state["step"], state["samples"]
        self._epoch_began = state.get("epoch_began", self._step if self._epoch else 0)
        self._knows_began = "epoch_began" in state
