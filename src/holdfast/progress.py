"""What a training loop knows beside its tensors: how far it is, and its random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

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


class RNG:
    """The global random generators: Python's, NumPy's, PyTorch's, and one per CUDA device.

    Put one into the state; random numbers after a resume are then those that would have followed.
    """

    def state_dict(self) -> dict[str, Any]:
        numpy_state = np.random.get_state()
        state: dict[str, Any] = {"python": random.getstate(), "numpy": numpy_state}
        torch = _torch()
        if torch is not None:
            state["torch"] = torch.get_rng_state()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Devices that were not there when the state was saved keep their own generators.

        Raises ``PlanError`` for a state that is not one of ``RNG``.
        """
        if not isinstance(state, dict) or not {"python", "numpy"} <= set(state):
            raise PlanError(
                "This is not the state of an RNG",
                expected="python, numpy and torch",
                found=", ".join(map(str, state)) if isinstance(state, dict) else type(state),
            )
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch = _torch()
        if torch is not None and "torch" in state:
            torch.set_rng_state(state["torch"])
            if "cuda" in state and torch.cuda.is_available():
                count = min(len(state["cuda"]), torch.cuda.device_count())
                for device, saved in enumerate(state["cuda"][:count]):
                    torch.cuda.set_rng_state(saved, device)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch
