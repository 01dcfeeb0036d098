"""What a training loop knows beside its tensors: how far it is, and its random generators."""

from __future__ import annotations

from holdfast.errors import PlanError


class Progress:
    """How far training is. ``step`` is counted by the ``Checkpointer``; ``epoch`` and ``samples``
    are the user's."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0
        self.samples = 0

    def __repr__(self) -> str:
        return f"Progress(epoch={self.epoch}, step={self.step}, samples={self.samples})"

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises ``PlanError`` for a state that is not one of ``Progress``."""
        if not isinstance(state, dict) or set(state) != {"epoch", "step", "samples"}:
            raise PlanError(
                "This is not the state of a Progress",
                expected="epoch, step and samples",
                found=", ".join(map(str, state)) if isinstance(state, dict) else type(state),
            )
        self.epoch, self.step, self.samples = state["epoch"], state["step"], state["samples"]
