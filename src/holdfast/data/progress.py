"""The progress of a training loop: its epoch, step, and number of samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.errors import PlanError


@dataclass(eq=False)
class Progress:
    """The progress of the training.

    The ``Checkpointer`` increments ``step``. The user sets ``epoch`` and ``samples``.
    """

    epoch: int = field(default=0, init=False)
    step: int = field(default=0, init=False)
    samples: int = field(default=0, init=False)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load a state. Raises ``PlanError`` if it is not the state of a ``Progress``."""
        if not isinstance(state, dict) or set(state) != {"epoch", "step", "samples"}:
            raise PlanError(
                "The loaded value is not the state of a Progress",
                expected="epoch, step, and samples",
                found=", ".join(map(str, state)) if isinstance(state, dict) else type(state),
            )
        self.epoch, self.step, self.samples = state["epoch"], state["step"], state["samples"]
