"""The global random generators."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Any

import numpy as np

from holdfast.errors import PlanError
from holdfast.lazy_torch import torch_or_none


class RNG:
    """The global random generators: Python's, NumPy's, PyTorch's where the program has loaded it,
    and one for each device of the accelerator that PyTorch uses here.

    Put one into the state; random numbers after a resume are then those that would have followed.
    NumPy has one global generator, the legacy one; a ``numpy.random.Generator`` is its owner's.

    Each rank keeps its own. A rank that was not there when the snapshot was saved gets seeds that
    are made of rank 0's and its number.
    """

    keeps_per_rank = True

    def state_dict(self) -> dict[str, Any]:
        """The generators' states by name; those of devices under the name of their type, such as
        ``cuda``: a list, one per device, if the program uses the device at all."""
        numpy_state = np.random.get_state()
        version, words, gauss = random.getstate()
        python = {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
        state: dict[str, Any] = {"python": python, "numpy": numpy_state}
        torch = torch_or_none()
        if torch is not None:
            state["torch"] = torch.get_rng_state()
            kind, device = _accelerator(torch)
            # first whether the program uses it: the other question may spoil a later fork
            used = getattr(device, "is_initialized", lambda: True)()
            if used and torch.accelerator.is_available():
                state[kind] = [device.get_rng_state(*place) for place in _device_arguments(torch)]
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
        python = state["python"]
        if isinstance(python, dict):  # snapshots before Holdfast knew ranks have the tuple itself
            python = (python["version"], tuple(python["words"].tolist()), python["gauss"])
        random.setstate(python)
        np.random.set_state(state["numpy"])
        if "torch" in state:
            import torch  # it may come after the resume: it is then to go on from here

            torch.set_rng_state(state["torch"])
            kind, device = _accelerator(torch)
            if kind in state and torch.accelerator.is_available():
                for saved, place in zip(state[kind], _device_arguments(torch), strict=False):
                    device.set_rng_state(saved, *place)

    def derive(self, rank: int) -> None:
        """Go on from seeds that are made of the state that there is, and of a rank's number."""
        made = sha256(repr((random.getstate(), rank)).encode()).digest()
        seed = int.from_bytes(made[:8], "little") >> 1
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch = torch_or_none()
        if torch is not None:
            torch.manual_seed(seed)


def _accelerator(torch: Any) -> tuple[str, Any]:
    """The type of the accelerator that PyTorch was built for, and its module; None if for none."""
    device = torch.accelerator.current_accelerator()
    return ("cpu", None) if device is None else (device.type, torch.get_device_module(device))


def _device_arguments(torch: Any) -> list[tuple[int, ...]]:
    """How the accelerator's module calls its devices: one alone needs no number; MPS takes none."""
    count = torch.accelerator.device_count()
    return [()] if count == 1 else [(i,) for i in range(count)]
